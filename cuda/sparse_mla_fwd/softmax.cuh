// The base that exponentials are taken relative to. It follows the running maximum of a head's scores at a distance, so
// that what is accumulated is rarely rescaled. Scores, maxima and bases are in units of log2.
#pragma once

#include "../common/math.cuh"

namespace cupymla::sparse_mla_fwd {

// Probabilities stay below 2^8, far from fp16's 65504. The fp32 sums may in turn be 2^8 times what they are relative
// to the maximum, which costs range, not accuracy: values past 2^120 may overflow where their average would not.
constexpr float kSlack = 8.f;
// Past this a base is so coarse that the product of score and unit, kept exact by a fused multiply-add, may lie many
// powers of two away from it.
constexpr float kCoarseBase = 1048576.f;

// With no valid entry so far the base is -inf; any finite stand-in makes every exponential 0.
__device__ __forceinline__ float finite_or_zero(float x) { return x == negative_infinity() ? 0.f : x; }

// The base for a block of that maximum, given the base before it. A NaN maximum becomes the base.
__device__ __forceinline__ float next_base(float base, float block_max) {
  return block_max <= base + kSlack ? base : block_max;
}

__device__ __forceinline__ bool is_coarse(float base) { return fabsf(finite_or_zero(base)) > kCoarseBase; }

// What brings sums relative to `base` to `new_base`.
__device__ __forceinline__ float base_factor(float base, float new_base) {
  return exp2_approx(base - finite_or_zero(new_base));
}

}  // namespace cupymla::sparse_mla_fwd
