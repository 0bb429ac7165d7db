// What stages have in common that go through rows, of keys or of queries.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss_dense {

constexpr int kRowThreads = 256;
constexpr float kLargestFloat = 0x1.fffffep127f;

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) <= kLargestFloat; }

__device__ __forceinline__ float weight_of(const Parameters& params, int32_t row, int32_t head) {
  const int64_t place = row * params.weights_query + head * params.weights_head;
  return params.bf16_weights != 0 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(params.weights)[place])
                                  : reinterpret_cast<const float*>(params.weights)[place];
}

// Whether all of eight neighbours are finite.
__device__ __forceinline__ bool are_finite(const uint4& eight) {
  const Element* values = reinterpret_cast<const Element*>(&eight);
  bool all = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) all = all && is_finite(static_cast<float>(values[i]));
  return all;
}

__device__ __forceinline__ int64_t first_thread() {
  return static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * kRowThreads; }

}  // namespace cupymla::indexer_loss_dense
