// An exponential for results in fp32.
#pragma once

#include "math.cuh"

namespace cupymla {

// 2^exponent, which is a normal float.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// 2^x to about one unit in the last place, where ex2.approx may be off by two. The series of exp(f ln 2) for
// |f| <= 1/2; what it leaves out is below 2^-27.
__device__ __forceinline__ float accurate_exp2(float x) {
  const float clamped = x > 150.f ? 150.f : x < -150.f ? -150.f : x;  // infinities; NaN stays
  const float whole = rintf(clamped), f = (clamped - whole) * kLn2;
  float sum = 1.f / 5040.f;
  sum = fmaf(sum, f, 1.f / 720.f);
  sum = fmaf(sum, f, 1.f / 120.f);
  sum = fmaf(sum, f, 1.f / 24.f);
  sum = fmaf(sum, f, 1.f / 6.f);
  sum = fmaf(sum, f, 0.5f);
  sum = fmaf(sum, f, 1.f);
  sum = fmaf(sum, f, 1.f);
  const int exponent = static_cast<int>(whole), half = exponent / 2;  // 2^150 is no float
  return sum * power_of_two(half) * power_of_two(exponent - half);
}

}  // namespace cupymla
