// The one order of an index score's operations, so that every kernel of the family gives a (query, key) the same bits:
//
//   z_h     = q_h . k                         tensor cores, channels in order, 32 bytes a step
//   w_h     = weight_h * q_scale_h            one rounding; weight_h where there is no q_scale
//   chain_r = fma(w_h, max(z_h, floor), ...)  over the heads h = r, r + 8, r + 16, ..., from +0; r = 0..7
//   pair_c  = chain_2c + chain_2c+1           c = 0..3
//   score   = ((pair_0 + pair_1) + (pair_2 + pair_3)) * k_scale
//
// Heads that are not there have w_h = 0 and z_h = 0. The NumPy statement is cupymla/ops/indexer_score.py.
#pragma once

#include "math.cuh"

namespace cupymla::indexer {

// What `floor` is: 0 with a ReLU, -inf without. A NaN passes either way.
__device__ __forceinline__ float relu_floor(bool relu) { return relu ? 0.0f : negative_infinity(); }

__device__ __forceinline__ float head_weight(float weight, float q_scale) { return __fmul_rn(weight, q_scale); }

__device__ __forceinline__ float add_head(float chain, float weight, float product, float floor) {
  return __fmaf_rn(weight, max_nan(product, floor), chain);
}

// The sum of the four lanes' pairs, in each of them.
__device__ __forceinline__ float add_pairs(float pair) {
  pair = __fadd_rn(pair, __shfl_xor_sync(0xffffffffu, pair, 1));
  return __fadd_rn(pair, __shfl_xor_sync(0xffffffffu, pair, 2));
}

// The same for four scores at a time: lane c of the four gets the sum of pairs[c].
__device__ __forceinline__ float add_pairs_of_four(const float (&pairs)[4], int quad_lane) {
  const bool odd = (quad_lane & 1) != 0;
  const float low =
      __fadd_rn(odd ? pairs[1] : pairs[0], __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1));
  const float high =
      __fadd_rn(odd ? pairs[3] : pairs[2], __shfl_xor_sync(0xffffffffu, odd ? pairs[2] : pairs[3], 1));
  const bool upper = (quad_lane & 2) != 0;
  return __fadd_rn(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 2));
}

}  // namespace cupymla::indexer
