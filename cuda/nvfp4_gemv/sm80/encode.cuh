// From floats to 4-bit and 8-bit codes: to nearest, ties to even, saturating, as the formats' definitions have it.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

__device__ __forceinline__ bool is_nan(float value) { return value != value; }

// The code of a number, NaN excepted. A midpoint goes to the neighbour whose code is even.
__device__ __forceinline__ uint32_t e2m1_code(float value) {
  const float magnitude = fabsf(value);
  const uint32_t code = (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
                        (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
  return code | (__float_as_uint(value) >> 31 << 3);
}

// The code of a number that is not negative, or NaN.
__device__ __forceinline__ uint32_t e4m3_code(float value) {
  if (is_nan(value)) return 0x7Fu;
  if (value >= 448.0f) return 0x7Eu;
  // Below 2^-6 the codes count steps of 2^-9.
  if (value < 0.015625f) return static_cast<uint32_t>(__float2int_rn(value * 512.0f));
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = (bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20;
  return min(rounded - (120u << 3), 0x7Eu);
}

// MXFP4's scale for blocks with this largest magnitude: 2^(floor(log2 amax) - 2), at least 2^-127.
__device__ __forceinline__ uint32_t e8m0_code_of_amax(float amax) {
  if (is_nan(amax)) return 0xFFu;
  const uint32_t exponent = min(__float_as_uint(amax) >> 23, 254u);
  return exponent < 2 ? 0u : exponent - 2;
}

}  // namespace cupymla::nvfp4_gemv
