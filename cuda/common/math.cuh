// Arithmetic: exponentials and logarithms, packed 16-bit elements, dot products, reductions over the lanes that share a
// row of an MMA accumulator, 64-bit indices, bytes of words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

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

// Of eight neighbours, from 16 bytes of either side.
template <typename Element>
__device__ __forceinline__ float dot_eight(const uint4& a, const uint4& b) {
  const Element* x = reinterpret_cast<const Element*>(&a);
  const Element* y = reinterpret_cast<const Element*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

// The quotient of numbers that are not negative.
__device__ __forceinline__ int64_t quotient(int64_t number, int64_t divisor) {
  if (static_cast<uint64_t>(number | divisor) >> 32 == 0) {
    return static_cast<uint32_t>(number) / static_cast<uint32_t>(divisor);
  }
  return number / divisor;
}

__device__ __forceinline__ int64_t multiply_add_wide(int32_t a, int32_t b, int64_t c) {
  int64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}

// Bytes of two words by a selector of four nibbles, of which one with bit 3 gives the byte's sign eight times.
__device__ __forceinline__ uint32_t signed_permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

}  // namespace cupymla
