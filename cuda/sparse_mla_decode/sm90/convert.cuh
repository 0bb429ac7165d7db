// Rows of a cache as elements of the products: e4m3 codes times their scale, and bf16, into 16-bit elements.
//
// Into bf16 without a conversion instruction, of which a multiprocessor does 16 a cycle: the bits of a code, seven
// places further left in the upper byte, are those of a bf16 that is 2^-120 of the value, subnormals included. What
// multiplies it is exact but for one rounding, that of the product with the scale. NaN has no such bits and is put in
// behind; see `has_nan`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/fp8_fp4.cuh"
#include "../../common/math.cuh"
#include "../../common/row_access.cuh"

namespace cupymla::sparse_mla_decode {

// A scale that multiplies pairs of bf16. One of fp32 is in two parts of eight bits; with both a product is off by 2^-16
// of itself before it is rounded to eight bits.
template <bool kPowersOfTwo>
struct PairScale {
  uint32_t high, low;

  __device__ __forceinline__ explicit PairScale(float scale) {
    const uint32_t bits = __float_as_uint(scale);
    high = __byte_perm(bits, bits, 0x3232);
    low = 0;
    if constexpr (!kPowersOfTwo) {
      const float rest = scale - __uint_as_float(bits & 0xffff0000u);
      // Of an infinity nothing is left over; of a NaN it is NaN, which may be all in the lower half.
      const float left = (bits & 0x7fffffffu) == 0x7f800000u ? 0.f : rest;
      low = pack_pair<__nv_bfloat16>(left, left);
    }
  }

  __device__ __forceinline__ uint32_t times(uint32_t pair) const {
    return kPowersOfTwo ? multiply_bf16(pair, high) : multiply_add_bf16(pair, high, multiply_bf16(pair, low));
  }
};

// 2^(exponent - 127); 255 is NaN (OCP Microscaling Formats, "E8M0").
__device__ __forceinline__ float power_of_exponent(uint32_t exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7fff0000u : exponent << 23);
}

// What has bit 7 set in a byte whose code is NaN; `magnitudes` are four codes without their signs.
__device__ __forceinline__ uint32_t nan_bits(uint32_t magnitudes) { return magnitudes + 0x01010101u; }
__device__ __forceinline__ bool has_nan(uint32_t bits) { return (bits & 0x80808080u) != 0; }

// Two codes of a word, bytes kFirst and kFirst + 1, as bf16, exact but for NaN.
template <int kFirst>
__device__ __forceinline__ uint32_t bf16_of_codes(uint32_t codes) {
  constexpr uint32_t kTimes = 0x7b807b80u;  // 2^120
  const uint32_t bytes = __byte_perm(codes, 0u, kFirst == 0 ? 0x4140 : 0x4342);  // one in each half's lower byte
  // Four places further left, and the sign eight: 2^4 and, of the sign, 2^8 - 2^4 more.
  const uint32_t placed = (bytes & 0x00800080u) * 0xf0u + bytes * 16u;
  return multiply_bf16(placed, kTimes);
}

// Eight codes times their scale.
template <typename Element, bool kPowersOfTwo>
struct Decoder;

template <bool kPowersOfTwo>
struct Decoder<__nv_bfloat16, kPowersOfTwo> {
  static constexpr bool kKeepsNan = false;
  PairScale<kPowersOfTwo> scale;

  __device__ __forceinline__ explicit Decoder(float scale) : scale(scale) {}

  __device__ __forceinline__ uint4 operator()(uint32_t low, uint32_t high) const {
    return make_uint4(scale.times(bf16_of_codes<0>(low)), scale.times(bf16_of_codes<2>(low)),
                      scale.times(bf16_of_codes<0>(high)), scale.times(bf16_of_codes<2>(high)));
  }
};

template <bool kPowersOfTwo>
struct Decoder<__half, kPowersOfTwo> {
  static constexpr bool kKeepsNan = true;
  float scale;

  __device__ __forceinline__ explicit Decoder(float scale) : scale(scale) {}

  __device__ __forceinline__ uint32_t pair(uint32_t codes) const {
    const float2 values = __half22float2(halves_of_e4m3(codes));
    return pack_pair<__half>(values.x * scale, values.y * scale);
  }

  __device__ __forceinline__ uint4 operator()(uint32_t low, uint32_t high) const {
    return make_uint4(pair(low & 0xffffu), pair(low >> 16), pair(high & 0xffffu), pair(high >> 16));
  }
};

// A pair of bf16 as a pair of elements.
template <typename Element>
__device__ __forceinline__ uint32_t from_bf16(uint32_t pair) {
  if constexpr (is_same_v<Element, __nv_bfloat16>) return pair;
  return pack_pair<Element>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

}  // namespace cupymla::sparse_mla_decode
