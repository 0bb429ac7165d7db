// The one order of an index score's operations, so that every kernel of the family gives a (query, key) the same bits:
//
//   z_h     = q_h . k                         tensor cores, channels in order, 32 bytes a step
//   w_h     = weight_h * q_scale_h            one rounding; weight_h where there is no q_scale
//   sum_c   = fma(w_h, max(z_h, 0), ...)      over the heads h = 2c, 2c + 1, 8 + 2c, 8 + 2c + 1, 16 + 2c, ..., from +0,
//                                             c = 0..3; without a ReLU fma(w_h, z_h, ...); a NaN passes either way
//   score   = ((sum_0 + sum_1) + (sum_2 + sum_3)) * k_scale
//
// Heads that are not there have w_h = 0 and z_h = 0. The NumPy statement is cupymla/ops/indexer_score.py.
#pragma once

#include "math.cuh"

namespace cupymla::indexer {

// The causal limit: this many keys are complete at a query's position, at most `keys`. The quotient is a floor, also of
// a negative position.
__device__ __forceinline__ int32_t causal_end(int64_t q_start, int64_t query, int64_t k_stride, int32_t keys) {
  const int64_t position = q_start + query + 1;
  const int64_t limit = position <= 0 ? 0 : position / k_stride;
  return limit < keys ? static_cast<int32_t>(limit) : keys;
}

__device__ __forceinline__ float head_weight(float weight, float q_scale) { return __fmul_rn(weight, q_scale); }

// `floor`: 0, or -inf where there is no ReLU.
__device__ __forceinline__ float add_head(float sum, float weight, float product, float floor) {
  return __fmaf_rn(weight, max_nan(product, floor), sum);
}

// Adds what the four lanes of a row have, for two scores at a time: lanes 0 and 2 get that of sums[0], the others that
// of sums[1].
__device__ __forceinline__ float add_sums_of_two(const float (&sums)[2], int quad_lane) {
  const bool odd = (quad_lane & 1) != 0;
  const float half = __fadd_rn(odd ? sums[1] : sums[0], __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1));
  return __fadd_rn(half, __shfl_xor_sync(0xffffffffu, half, 2));
}

// The same for four scores at a time: lane c of the four gets that of sums[c].
__device__ __forceinline__ float add_sums_of_four(const float (&sums)[4], int quad_lane) {
  const bool odd = (quad_lane & 1) != 0;
  const float low =
      __fadd_rn(odd ? sums[1] : sums[0], __shfl_xor_sync(0xffffffffu, odd ? sums[0] : sums[1], 1));
  const float high =
      __fadd_rn(odd ? sums[3] : sums[2], __shfl_xor_sync(0xffffffffu, odd ? sums[2] : sums[3], 1));
  const bool upper = (quad_lane & 2) != 0;
  return __fadd_rn(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 2));
}

}  // namespace cupymla::indexer
