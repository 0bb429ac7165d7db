// 8-bit floats into fp16 pairs, exactly: every e4m3 and e5m2 value is an fp16 number. NaN stays NaN.
// (PTX ISA, "cvt": e4m3x2 to f16x2 from sm_89 on; OCP 8-bit floating point specification, 2023.)
#pragma once

#include <cuda_fp16.h>

#include "integers.cuh"

namespace cupymla {

struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Two e4m3 numbers in bits 0-15 as an fp16 pair.
__device__ __forceinline__ uint32_t e4m3_pair_to_half(uint32_t pair) {
  uint32_t half_pair;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half_pair) : "h"(static_cast<uint16_t>(pair)));
#else
  // Sign to bit 15, exponent and mantissa to bits 13-7: an fp16 number 2^8 too small, subnormals included.
  const uint32_t high_bytes = __byte_perm(pair, 0u, 0x1404);
  const uint32_t small = (high_bytes & 0x80008000u) | ((high_bytes & 0x7f007f00u) >> 1);
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&small), __float2half2_rn(256.0f));
  half_pair = *reinterpret_cast<const uint32_t*>(&scaled);
  if ((high_bytes & 0x7f000000u) == 0x7f000000u) half_pair |= 0x7fff0000u;
  if ((high_bytes & 0x00007f00u) == 0x00007f00u) half_pair |= 0x00007fffu;
#endif
  return half_pair;
}

// Two e5m2 numbers in bits 0-15 as an fp16 pair: e5m2 is the upper byte of fp16.
__device__ __forceinline__ uint32_t e5m2_pair_to_half(uint32_t pair) { return __byte_perm(pair, 0u, 0x1404); }

// Two 8-bit numbers of that type in bits 0-15 as an fp16 pair.
template <typename Fp8>
__device__ __forceinline__ uint32_t pair_to_half(uint32_t pair);

template <>
__device__ __forceinline__ uint32_t pair_to_half<E4m3>(uint32_t pair) {
  return e4m3_pair_to_half(pair);
}

template <>
__device__ __forceinline__ uint32_t pair_to_half<E5m2>(uint32_t pair) {
  return e5m2_pair_to_half(pair);
}

}  // namespace cupymla
