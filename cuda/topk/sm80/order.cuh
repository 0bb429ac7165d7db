// The total order of a selection: the larger score first, among equals the smaller column. One 64-bit key says both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/types.cuh"
#include "../../common/math.cuh"

namespace cupymla::topk {

// CUPYMLA_SCORES: 0 fp32, 1 bf16, 2 fp16.
#if CUPYMLA_SCORES == 0
using Score = float;
__device__ __forceinline__ float to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t lowest_bits() { return 0xff800000u; }
using Bits = uint32_t;
#elif CUPYMLA_SCORES == 1
using Bits = uint16_t;
__device__ __forceinline__ float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ uint32_t lowest_bits() { return 0xff80u; }
#else
using Bits = uint16_t;
__device__ __forceinline__ float to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ uint32_t lowest_bits() { return 0xfc00u; }
#endif

// Keys of scores: unsigned integers in the order of the numbers. 0 stands for what is never selected, NaN and -inf.
// -0.0 has the key of +0.0.
constexpr uint32_t kLeastKey = 0x00800000u;    // of the most negative finite number
constexpr uint32_t kLargestKey = 0xff800000u;  // of +inf

__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return score > negative_infinity() ? key : 0u;
}

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// An entry's place in the total order; no two entries of a row have the same.
__device__ __forceinline__ uint64_t place_of(float score, int32_t column) {
  return static_cast<uint64_t>(key_of(score)) << 32 | ~static_cast<uint32_t>(column);
}

__device__ __forceinline__ int32_t column_of(uint64_t place) {
  return static_cast<int32_t>(~static_cast<uint32_t>(place));
}

// Places below this one are those of entries that are never selected.
constexpr uint64_t kLeastPlace = static_cast<uint64_t>(kLeastKey) << 32;

}  // namespace cupymla::topk
