// Running sums over the lanes of a warp.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The sum over lanes 0 to `lane`, this one's included. All lanes take part.
__device__ __forceinline__ uint32_t warp_scan(uint32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t lower = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

}  // namespace cupymla
