// What stages have in common that go through rows of dk.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::indexer_bwd {

constexpr int kRowThreads = 256;

__device__ __forceinline__ int64_t first_thread() {
  return static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * kRowThreads; }

}  // namespace cupymla::indexer_bwd
