// Rows of a cache as elements of the products: e4m3 codes times their scale, and bf16, into 16-bit elements.
//
// Into bf16 without a conversion instruction, of which a multiprocessor does 16 a cycle: the bits of a code, four
// places further left, are those of a bf16 that is 2^-120 of the value, subnormals included. What multiplies it is the
// scale times 2^120, and is exact but for one rounding. NaN has no such bits, and some scales no such multiple: where
// there are any, `element_pair` takes the place of all that.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/fp8_fp4.cuh"
#include "../../common/math.cuh"
#include "../../common/row_access.cuh"

namespace cupymla::sparse_mla_decode {

// 2^(exponent - 127); 255 is NaN (OCP Microscaling Formats, "E8M0").
__device__ __forceinline__ float power_of_exponent(uint32_t exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fff0000u : exponent << 23);
}

// Two codes times their scale, for any of them: two conversions, two products, one rounding more.
template <typename Element>
__device__ __forceinline__ uint32_t element_pair(uint32_t codes, float scale) {
  const float2 values = __half22float2(halves_of_e4m3(codes));
  return pack_pair<Element>(values.x * scale, values.y * scale);
}

// What has bit 7 set in a byte whose code is NaN.
__device__ __forceinline__ uint32_t nan_bits(uint32_t codes) { return (codes & 0x7f7f7f7fu) + 0x01010101u; }
__device__ __forceinline__ bool has_nan(uint32_t bits) { return (bits & 0x80808080u) != 0; }

// Two codes of a word, bytes kFirst and kFirst + 1, as bf16 that are 2^-120 of them.
template <int kFirst>
__device__ __forceinline__ uint32_t bf16_of_codes(uint32_t codes) {
  // Each in its half's lower byte, its sign all over the upper one.
  const uint32_t bytes = permute_bytes<kFirst == 0 ? 0x9180 : 0xb3a2>(codes);
  return bytes << 4 & 0x87f087f0u;
}

// What multiplies such pairs, as a lane knows it that looked for the row: `of` an fp32 scale are the two parts
// of 2^120 of it, of eight bits each: with both a product is off by 2^-16 of itself before it is rounded to eight bits.
struct FoldedScale {
  static constexpr float kFactor = 0x1p120f;

  static __device__ __forceinline__ bool fits(float scale) { return fabsf(scale) < 0x1p7f; }
  static __device__ __forceinline__ uint32_t of(float scale) {
    const float folded = scale * kFactor;
    const uint32_t high = __float_as_uint(folded) & 0xffff0000u;
    return __byte_perm(pack_pair<__nv_bfloat16>(folded - __uint_as_float(high), 0.f), high, 0x7610);
  }

  const uint32_t high, low;

  __device__ __forceinline__ explicit FoldedScale(uint32_t parts)
      : high(__byte_perm(parts, parts, 0x3232)), low(__byte_perm(parts, parts, 0x1010)) {}

  __device__ __forceinline__ uint32_t times(uint32_t pair) const {
    return multiply_add_bf16(pair, high, multiply_bf16(pair, low));
  }
};

// The same of a power of two, from the word that has its exponent.
struct FoldedPower {
  static __device__ __forceinline__ bool fit(uint32_t exponents) {  // four; those below 135 do
    return (((exponents & 0x7f7f7f7fu) + 0x79797979u) & exponents & 0x80808080u) == 0;
  }

  const uint32_t power;

  __device__ __forceinline__ FoldedPower(uint32_t exponents, int which)
      : power(__byte_perm(exponents, 0u, 0x4440 + which) * 0x00800080u + 0x3c003c00u) {}

  __device__ __forceinline__ uint32_t times(uint32_t pair) const { return multiply_bf16(pair, power); }
};

// Eight codes times what folds their scale, but for NaN.
template <typename Folded>
__device__ __forceinline__ uint4 eight_bf16(const Folded& scale, uint32_t low, uint32_t high) {
  return make_uint4(scale.times(bf16_of_codes<0>(low)), scale.times(bf16_of_codes<2>(low)),
                    scale.times(bf16_of_codes<0>(high)), scale.times(bf16_of_codes<2>(high)));
}

// Eight codes times their scale.
template <typename Element>
__device__ __forceinline__ uint4 eight_elements(uint32_t low, uint32_t high, float scale) {
  return make_uint4(element_pair<Element>(low & 0xffffu, scale), element_pair<Element>(low >> 16, scale),
                    element_pair<Element>(high & 0xffffu, scale), element_pair<Element>(high >> 16, scale));
}

// A pair of bf16 as a pair of elements.
template <typename Element>
__device__ __forceinline__ uint32_t from_bf16(uint32_t pair) {
  if constexpr (is_same_v<Element, __nv_bfloat16>) return pair;
  return pack_pair<Element>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

}  // namespace cupymla::sparse_mla_decode
