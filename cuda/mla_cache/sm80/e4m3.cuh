// fp32 to E4M3 (OCP 8-bit floating point specification, 2023), and the scale of a group.
#pragma once

#include <cuda_fp8.h>

#include "../../common/types.cuh"

namespace cupymla::mla_cache {

// A code: to nearest even, saturated to 448; every NaN gives 0x7f.
__device__ __forceinline__ uint32_t e4m3_code(float value) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  const uint32_t sign = bits >> 24 & 0x80u;
  // Below 2^-6 codes count units of 2^-9; the product is exact.
  if (magnitude < 0x3c800000u) {
    return sign | static_cast<uint32_t>(__float2int_rn(__uint_as_float(magnitude) * 512.0f));
  }
  const uint32_t most = min(magnitude, 0x43e00000u);  // 448
  const uint32_t rounded = most + 0x7ffffu + (most >> 20 & 1u);
  return sign | ((rounded >> 20) - (120u << 3));  // the exponent's bias falls from 127 to 7
}

// Two codes, the first in bits 0-7.
__device__ __forceinline__ uint32_t e4m3_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
#else
  return e4m3_code(first) | e4m3_code(second) << 8;
#endif
}

// A quotient of two numbers, made better by what it leaves of the dividend.
__device__ __forceinline__ float corrected(float value, float quotient, float divisor, float reciprocal) {
  return __fmaf_rn(-__fmaf_rn(quotient, divisor, -value), reciprocal, quotient);
}

// A number that is not negative over 448, rounded as IEEE 754 has it if it is normal: tried for each significand.
__device__ __forceinline__ float over_448(float value) {
  constexpr float kReciprocal = 1.0f / 448.0f;
  return corrected(value, __fmul_rn(value, kReciprocal), 448.0f, kReciprocal);
}

// The scale of a group whose largest magnitude is `amax`, finite. DeepGEMM's rule for indexer keys: a group below 1e-4
// has the scale of 1e-4. With `pow2` the scale is rounded up to a power of two.
__device__ __forceinline__ float scale_of(float amax, bool pow2) {
  const float scale = over_448(fmaxf(amax, 1e-4f));
  return pow2 ? __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u) : scale;
}

}  // namespace cupymla::mla_cache
