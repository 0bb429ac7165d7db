// Sums that do not depend on the order of their terms: 64-bit integers in units that a key's bound fixes. A bound is
// the largest, over a key's entries, of |gradient| * sum_h |w_h| * max |q|; so no term is larger, and 2^adds_log2 of
// them fit. An entry whose heads come in two blocks adds two terms, which together keep to its bound.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"

namespace cupymla::indexer_bwd {

constexpr float kLargestFloat = 0x1.fffffep127f;

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) <= kLargestFloat; }

// log2 of how many units a 1 is. A bound is below 2^(E + 1), E its exponent; twice that leaves room for the rounding of
// what is bounded, one bit is the sign's, and one is left over.
__device__ __forceinline__ int unit_log2(float bound, int adds_log2) {
  const int exponent = static_cast<int>(__float_as_uint(bound) >> 23 & 255u) - 127;
  return 62 - adds_log2 - (exponent + 2);
}

// Units of a value. Two factors: together they may be no float.
struct ToUnits {
  float first, second;

  __device__ __forceinline__ explicit ToUnits(int unit_log2)
      : first(power_of_two(unit_log2 / 2)), second(power_of_two(unit_log2 - unit_log2 / 2)) {}

  __device__ __forceinline__ long long operator()(float value) const {
    return __float2ll_rn(__fmul_rn(__fmul_rn(value, first), second));
  }
};

__device__ __forceinline__ float from_units(long long units, int unit_log2) {
  const double unit = __longlong_as_double(static_cast<long long>(1023 - unit_log2) << 52);
  return static_cast<float>(static_cast<double>(units) * unit);
}

}  // namespace cupymla::indexer_bwd
