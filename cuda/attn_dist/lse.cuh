// A head's lse in units of log2, for all architectures.
#pragma once

#include "../common/math.cuh"

namespace cupymla::attn_dist {

// 2^-lse = factor * 2^-rounded. So a weight exp2(score - rounded) * factor has no error from the rounding, half a unit
// in the last place of the exponent, which for an lse in natural units would be the largest of all where scores are
// small.
struct Log2Lse {
  float rounded;
  float factor;  // between 0.95 and 1.05
};

// `unit` and `unit_rest` add up to what turns the caller's units into those of log2.
__device__ __forceinline__ Log2Lse log2_lse(float lse, float unit, float unit_rest) {
  const float rounded = __fmul_rn(lse, unit);
  const float rest = -kLn2 * fmaf(lse, unit_rest, fmaf(lse, unit, -rounded));
  // exp(rest) to its third order. Past 2^20, and at infinities and NaN, nothing is made up for: a float's steps are
  // coarser there than what could be.
  const float factor = fmaf(rest, fmaf(rest, fmaf(rest, 1.f / 6.f, 0.5f), 1.f), 1.f);
  return {rounded, fabsf(rounded) <= 0x1p20f ? factor : 1.f};
}

}  // namespace cupymla::attn_dist
