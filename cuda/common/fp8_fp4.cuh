// Conversions from 8-bit and 4-bit floats (PTX ISA, "cvt"; OCP 8-bit floating point specification, 2023).
#pragma once

#include <cuda_fp16.h>

#include "types.cuh"

namespace cupymla {

// An E4M3 code, an E5M2 code: the elements of 8-bit arrays.
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Two codes, the first in bits 0-7, as the bits of a pair of halves, exact; NaN stays NaN.
template <typename Code>
__device__ __forceinline__ uint32_t half_bits_of(uint32_t codes);

template <>
__device__ __forceinline__ uint32_t half_bits_of<E4m3>(uint32_t codes) {
  uint32_t pair;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
#else
  // A half with the code's magnitude on bits 7-13 stands for 2^-8 of the value; the code of what would be 480 is NaN.
  const uint32_t bytes = __byte_perm(codes, 0u, 0x1404);
  const uint32_t scaled = (bytes & 0x80008000u) | ((bytes >> 1) & 0x3F803F80u);
  const __half2 values = __hmul2(*reinterpret_cast<const __half2*>(&scaled), __float2half2_rn(256.0f));
  pair = *reinterpret_cast<const uint32_t*>(&values);
  if ((bytes & 0x7F00u) == 0x7F00u) pair |= 0x7FFFu;
  if ((bytes & 0x7F000000u) == 0x7F000000u) pair |= 0x7FFF0000u;
#endif
  return pair;
}

// A code is the upper byte of the half.
template <>
__device__ __forceinline__ uint32_t half_bits_of<E5m2>(uint32_t codes) {
  return __byte_perm(codes, 0u, 0x1404);
}

__device__ __forceinline__ __half2 halves_of_e4m3(uint32_t codes) {
  const uint32_t pair = half_bits_of<E4m3>(codes);
  return *reinterpret_cast<const __half2*>(&pair);
}

// Whether the target converts E2M1 and E8M0 itself, as the family sm_100f does.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1000
#define CUPYMLA_FP4_CONVERSIONS 1
#else
#define CUPYMLA_FP4_CONVERSIONS 0
#endif
constexpr bool kFp4Conversions = CUPYMLA_FP4_CONVERSIONS != 0;

// Eight E2M1 codes, the first in bits 0-3, as pairs of halves (0, 1), (2, 3), (4, 5), (6, 7), exact. Needs
// kFp4Conversions.
__device__ __forceinline__ void halves_of_e2m1(uint32_t codes, uint32_t (&pairs)[4]) {
#if CUPYMLA_FP4_CONVERSIONS
  asm("{\n .reg .b8 b0, b1, b2, b3;\n mov.b32 {b0, b1, b2, b3}, %4;\n cvt.rn.f16x2.e2m1x2 %0, b0;\n"
      " cvt.rn.f16x2.e2m1x2 %1, b1;\n cvt.rn.f16x2.e2m1x2 %2, b2;\n cvt.rn.f16x2.e2m1x2 %3, b3;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(codes));
#endif
}

// Two E8M0 codes, the first in bits 0-7, as a pair of bfloat16, exact; 255 is NaN. Needs kFp4Conversions.
__device__ __forceinline__ uint32_t bfloats_of_e8m0(uint32_t codes) {
  uint32_t pair = 0;
#if CUPYMLA_FP4_CONVERSIONS
  asm("cvt.rn.bf16x2.ue8m0x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
#endif
  return pair;
}

}  // namespace cupymla
