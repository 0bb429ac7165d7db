// A bitonic sort in shared memory (Batcher, "Sorting networks and their applications", 1968).
#pragma once

#include "block.cuh"

namespace cupymla::topk {

// Sorts `count` places, a power of two, the largest first. To be called behind a barrier; synchronised after.
__device__ __forceinline__ void sort(const Thread& thread, uint64_t* places, uint32_t count) {
  for (uint32_t run = 2; run <= count; run *= 2) {
    for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
      for (uint32_t i = thread.index; i < count / 2; i += thread.threads) {
        const uint32_t low = 2 * i - (i & (distance - 1));
        const uint64_t a = places[low], b = places[low + distance];
        const bool descending = (low & run) == 0;
        if ((a < b) == descending) {
          places[low] = b;
          places[low + distance] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace cupymla::topk
