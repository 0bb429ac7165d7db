// Scalar and packed arithmetic, and reductions over the lanes that share a row of an MMA accumulator.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "integers.cuh"

namespace cupymla {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }

// 2^x to about 2 ulp; -inf gives 0, +inf gives +inf, NaN stays (PTX ISA, "ex2").
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Maximum that lets a NaN through, as the reference's does (PTX ISA, "max").
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Two floats as the 16-bit pair an MMA operand holds: `low` in bits 0-15.
template <typename Element>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Over the four lanes 4k..4k+3, which hold one accumulator row between them.
__device__ __forceinline__ float quad_max(float x) {
  x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return max_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Transposes the 4 x 4 words that four neighbouring lanes hold: word j of lane l goes to word l of lane j. First pairs
// of words cross between lanes two apart, then single words between neighbours.
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[4], int quad_lane) {
  const bool upper = (quad_lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? words[j] : words[j + 2], 2);
    (upper ? words[j] : words[j + 2]) = received;
  }
  const bool odd = (quad_lane & 1) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? words[j] : words[j + 1], 1);
    (odd ? words[j] : words[j + 1]) = received;
  }
}

}  // namespace cupymla
