// Elements of the matrices as numbers. Every one of these formats fits a float exactly.
#pragma once

#include <cuda_fp16.h>

#include "descriptor.cuh"

namespace cupymla::emulate {

// A float of `kExponent` and `kMantissa` bits with a sign on top; no infinities or NaN.
template <uint32_t kExponent, uint32_t kMantissa>
__device__ __forceinline__ float small_float(uint32_t word) {
  constexpr uint32_t kBias = (1u << (kExponent - 1)) - 1u;
  const uint32_t exponent = word >> kMantissa & ((1u << kExponent) - 1u);
  const uint32_t mantissa = word & ((1u << kMantissa) - 1u);
  constexpr float kSmallest = 1.0f / static_cast<float>(1u << (kBias - 1u + kMantissa));
  const float magnitude = exponent ? __uint_as_float((exponent - kBias + 127u) << 23 | mantissa << (23u - kMantissa))
                                   : static_cast<float>(mantissa) * kSmallest;
  return word >> (kExponent + kMantissa) & 1u ? -magnitude : magnitude;
}

__device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7fffffffu); }

__device__ __forceinline__ float e4m3(uint32_t word) {
  return (word & 0x7fu) == 0x7fu ? quiet_nan() : small_float<4, 3>(word);
}

// e5m2 is a half with a shorter mantissa.
__device__ __forceinline__ float e5m2(uint32_t word) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word << 8)));
}

// A scale factor: ue8m0 is a power of two, ue4m3 an e4m3 that is never negative.
__device__ __forceinline__ double scale_factor(uint32_t byte, bool is_ue8m0) {
  if (!is_ue8m0) return static_cast<double>(e4m3(byte & 0x7fu));
  return byte == 0xffu ? static_cast<double>(quiet_nan()) : ldexp(1.0, static_cast<int>(byte) - 127);
}

// An element from the low bits of a word; 4- and 6-bit ones are right-aligned.
__device__ __forceinline__ float number(Element element, uint32_t word) {
  switch (element) {
    case kElementF16: return __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    case kElementBf16: return __uint_as_float(word << 16);
    case kElementTf32: return __uint_as_float(word & 0xffffe000u);
    case kElementE4m3: return e4m3(word);
    case kElementE5m2: return e5m2(word);
    case kElementE2m3: return small_float<2, 3>(word);
    case kElementE3m2: return small_float<3, 2>(word);
    case kElementE2m1:
    case kElementE2m1Packed: return small_float<2, 1>(word);
    case kElementU8: return static_cast<float>(word & 0xffu);
    case kElementS8: return static_cast<float>(static_cast<signed char>(word & 0xffu));
    default: return quiet_nan();
  }
}

// Element `index` of 16 contiguous bytes of shared memory. 4- and 6-bit elements of the mixed kinds are packed at the
// front of their 16 bytes, the rest is padding; packed e2m1 fills all of them.
__device__ __forceinline__ float chunk_number(Element element, const uint4& chunk, uint32_t index) {
  uint32_t width = 8;
  if (element == kElementTf32) width = 32;
  if (element == kElementF16 || element == kElementBf16) width = 16;
  if (element == kElementE2m3 || element == kElementE3m2) width = 6;
  if (element == kElementE2m1 || element == kElementE2m1Packed) width = 4;
  const uint64_t low = static_cast<uint64_t>(chunk.y) << 32 | chunk.x;
  const uint64_t high = static_cast<uint64_t>(chunk.w) << 32 | chunk.z;
  const uint32_t at = index * width;
  uint64_t word = at < 64 ? low >> at : high >> (at - 64);
  if (at < 64 && at + width > 64) word |= high << (64 - at);
  return number(element, static_cast<uint32_t>(word) & (width == 32 ? 0xffffffffu : (1u << width) - 1u));
}

__device__ __forceinline__ uint32_t chunk_elements(Element element) {
  if (element == kElementTf32) return 4;
  if (element == kElementF16 || element == kElementBf16) return 8;
  return element == kElementE2m1Packed ? 32 : 16;
}

// Element `k` of a row of A in Tensor Memory, from the word that holds it. 4-bit elements of the mixed kinds sit in
// the middle of a byte, 6-bit ones at its low end.
__device__ __forceinline__ float tmem_number(Element element, uint32_t word, uint32_t k) {
  switch (element) {
    case kElementTf32: return number(element, word);
    case kElementF16:
    case kElementBf16: return number(element, word >> (k % 2 * 16) & 0xffffu);
    case kElementE2m1Packed: return number(element, word >> (k % 8 * 4) & 0xfu);
    case kElementE2m1: return number(element, word >> (k % 4 * 8 + 2) & 0xfu);
    case kElementE2m3:
    case kElementE3m2: return number(element, word >> (k % 4 * 8) & 0x3fu);
    default: return number(element, word >> (k % 4 * 8) & 0xffu);
  }
}

}  // namespace cupymla::emulate
