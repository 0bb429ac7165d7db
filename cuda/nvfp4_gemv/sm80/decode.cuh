// From 4-bit and 8-bit codes to the 16-bit floats that tensor cores multiply.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/fp8_fp4.cuh"
#include "../../common/math.cuh"

namespace cupymla::nvfp4_gemv {

// Bytes of two words by a selector of four nibbles (PTX ISA, "prmt").
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// Decoded weights are kept at 1 / kDecodeUnit of their value: 2^-14 is what E2M1's bits stand for where they land in a
// half, and what bfloat16 operands are brought to.
template <typename Operand>
constexpr float kDecodeUnit = 16384.0f;
template <>
constexpr float kDecodeUnit<__half> = kFp4Conversions ? 1.0f : 16384.0f;

// Eight E2M1 codes as pairs: by the instruction of sm_100f (0, 1), (2, 3), (4, 5), (6, 7), else (0, 4), (1, 5), (2, 6),
// (3, 7). With its sign on bit 15 and its magnitude on bits 9-11 a code is a half, subnormal codes included, of 2^-14
// times its value, and of 2^-126 on bits 6-8 of a bfloat16: the biases are 15 and 127 where E2M1's is 1.
__device__ __forceinline__ void decode(uint32_t word, uint32_t (&pairs)[4], __half) {
  if constexpr (kFp4Conversions) {
    halves_of_e2m1(word, pairs);
  } else {
    // The upper bytes of four halves at a time, because their lower bytes are zero.
    const uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
    const uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
    pairs[0] = permute(even, 0, 0x2404);
    pairs[1] = permute(odd, 0, 0x2404);
    pairs[2] = even & 0xFF00FF00u;
    pairs[3] = odd & 0xFF00FF00u;
  }
}

__device__ __forceinline__ void decode(uint32_t word, uint32_t (&pairs)[4], __nv_bfloat16) {
  // One product moves a code's magnitude by 6 bits and its sign by 12, to where nothing else lands.
  const uint32_t upper = word >> 8;
  pairs[0] = (word & 0x000F000Fu) * (64u + 4096u) & 0x81C081C0u;
  pairs[1] = (word & 0x00F000F0u) * (4u + 256u) & 0x81C081C0u;
  pairs[2] = (upper & 0x000F000Fu) * (64u + 4096u) & 0x81C081C0u;
  pairs[3] = (upper & 0x00F000F0u) * (4u + 256u) & 0x81C081C0u;
}

// E2M1 codes to bytes, twice the magnitude of each in the order of k: in `positive` where its sign is 0, in `negative`
// where it is 1, and zero in the other one. A code with its sign is the selector that looks its magnitude up or asks
// for the sign of what is found there, which is 0; all bits of it turned, for the table in reverse, are one for
// negative codes. They are turned by a product, which leaves the integer pipe five instructions for eight codes.
class ByteDecoder {
 public:
  // `zero` is 0. Where it has been read from memory ptxas does not know it, nor keeps tables in uniform registers, from
  // which it would move them for every use.
  __device__ __forceinline__ explicit ByteDecoder(uint32_t zero)
      : small_(zero + 0x03020100u), large_turned_(zero + 0x0406080Cu), minus_one_(zero - 1u) {}

  // Of eight codes.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&positive)[2], uint32_t (&negative)[2]) const {
    const uint32_t codes[2] = {word, word >> 16};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      positive[i] = signed_permute(small_, 0x0C080604u, codes[i]);
      negative[i] = signed_permute(large_turned_, 0x00010203u, codes[i] * minus_one_ + minus_one_);
    }
  }

  // The same as one signed byte per code.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t (&bytes)[2]) const {
    uint32_t negative[2];
    decode(word, bytes, negative);
#pragma unroll
    for (int i = 0; i < 2; ++i) bytes[i] = ((bytes[i] | 0x80808080u) - negative[i]) ^ 0x80808080u;
  }

 private:
  const uint32_t small_, large_turned_, minus_one_;
};

// Eight 16-bit floats in the order of `decode`'s pairs for that operand.
template <typename Operand>
__device__ __forceinline__ void pair_up(const uint32_t (&words)[4], uint32_t (&pairs)[4]) {
  if constexpr (kDecodeUnit<Operand> == 1.0f) {  // converted by the instruction
    for (int i = 0; i < 4; ++i) pairs[i] = words[i];
  } else {
    pairs[0] = permute(words[0], words[2], 0x5410);
    pairs[1] = permute(words[0], words[2], 0x7632);
    pairs[2] = permute(words[1], words[3], 0x5410);
    pairs[3] = permute(words[1], words[3], 0x7632);
  }
}

__device__ __forceinline__ uint32_t bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }

__device__ __forceinline__ __nv_bfloat162 bfloat_pair(uint32_t bits) {
  return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

__device__ __forceinline__ uint32_t times(uint32_t pair, __half2 factor) {
  return bits(__hmul2(*reinterpret_cast<__half2*>(&pair), factor));
}

__device__ __forceinline__ uint32_t times(uint32_t pair, __nv_bfloat162 factor) {
  return bits(__hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair), factor));
}

// An E8M0 code as a float: 2^(code - 127), subnormal for 0, NaN for 255.
__device__ __forceinline__ float e8m0(uint32_t code) {
  const uint32_t exponent = max(code << 23, 0x00400000u);
  return __uint_as_float(code == 0xFFu ? 0x7FFFFFFFu : exponent);
}

// The E8M0 codes in bits 0-7 and 8-15.
__device__ __forceinline__ float2 e8m0_pair(uint32_t codes) {
  if constexpr (kFp4Conversions) {
    const uint32_t pair = bfloats_of_e8m0(codes);
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  }
  return make_float2(e8m0(codes & 0xFFu), e8m0(codes >> 8 & 0xFFu));
}

}  // namespace cupymla::nvfp4_gemv
