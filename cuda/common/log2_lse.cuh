// A head's lse in units of log2, for all architectures.
#pragma once

#include "accurate_exp2.cuh"

namespace cupymla {

// 2^-lse = factor * 2^-rounded. So a weight exp2(score - rounded) * factor has no error from the rounding, half a unit
// in the last place of the exponent, which for an lse in natural units would be the largest of all where scores are
// small.
struct Log2Lse {
  float rounded;
  float factor;  // between 2^-1 and 2 up to 2^24; 1 past 2^30
};

// `unit` and `unit_rest` add up to what turns the caller's units into those of log2. What they leave out is 2^-49 of
// the result, which no weight shows up to 2^24; at 2^30 it is 1e-6 of a weight.
__device__ __forceinline__ Log2Lse log2_lse(float lse, float unit, float unit_rest) {
  const float rounded = __fmul_rn(lse, unit);
  const float factor = accurate_exp2(-fmaf(lse, unit_rest, fmaf(lse, unit, -rounded)));
  // From 2^30 on, and at infinities and NaN, nothing is made up for: half a unit in the last place is 64 there, and
  // lse * unit_rest can be 45 in natural units and grows with it, so that soon their sum's power of two is no float. A
  // factor is always finite: who multiplies by it knows that zero stays zero.
  return {rounded, fabsf(rounded) < 0x1p30f ? factor : 1.f};
}

}  // namespace cupymla
