// Eight neighbouring channels: from floats of any type, to them, and bytes. Accesses are as wide as an address allows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../common/math.cuh"
#include "../../common/types.cuh"

namespace cupymla::mla_cache {

constexpr int kChannels = 8;  // of a thread: 16 bytes of 16-bit floats

enum FloatType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

__device__ __forceinline__ int item_bytes(int32_t type) { return type == kFloat32 ? 4 : 2; }

__device__ __forceinline__ bool is_aligned(const void* address, unsigned bytes) {
  return (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) == 0;
}

// The bits of a 16-bit float as fp32, exact.
__device__ __forceinline__ float widened(uint32_t bits, int32_t type) {
  return type == kBfloat16 ? __uint_as_float(bits << 16)
                           : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ void load_channels(float (&values)[kChannels], const uint8_t* source, int32_t type) {
  if (type == kFloat32) {
    const float* const floats = reinterpret_cast<const float*>(source);
    if (is_aligned(source, 16)) {
      const float4 low = __ldg(reinterpret_cast<const float4*>(source));
      const float4 high = __ldg(reinterpret_cast<const float4*>(source) + 1);
      values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
      values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) values[i] = floats[i];
    }
    return;
  }
  uint32_t words[kChannels / 2];
  if (is_aligned(source, 16)) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(source));
    words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
  } else {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(source);
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) words[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
  }
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    values[2 * i] = widened(words[i] & 0xffffu, type);
    values[2 * i + 1] = widened(words[i] >> 16, type);
  }
}

__device__ __forceinline__ void store_channels(uint8_t* target, const float (&values)[kChannels], int32_t type) {
  if (type == kFloat32) {
    if (is_aligned(target, 16)) {
      float4* const pieces = reinterpret_cast<float4*>(target);
      pieces[0] = make_float4(values[0], values[1], values[2], values[3]);
      pieces[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
#pragma unroll
      for (int i = 0; i < kChannels; ++i) reinterpret_cast<float*>(target)[i] = values[i];
    }
    return;
  }
  uint32_t words[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    words[i] = type == kBfloat16 ? pack_pair<__nv_bfloat16>(values[2 * i], values[2 * i + 1])
                                 : pack_pair<__half>(values[2 * i], values[2 * i + 1]);
  }
  if (is_aligned(target, 16)) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      reinterpret_cast<uint16_t*>(target)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    }
  }
}

// Eight bytes at any address.
__device__ __forceinline__ uint2 load_bytes(const uint8_t* source) {
  if (is_aligned(source, 8)) return __ldg(reinterpret_cast<const uint2*>(source));
  uint2 words = make_uint2(0u, 0u);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words.x |= static_cast<uint32_t>(source[i]) << (8 * i);
    words.y |= static_cast<uint32_t>(source[4 + i]) << (8 * i);
  }
  return words;
}

__device__ __forceinline__ void store_bytes(uint8_t* target, uint2 words) {
  if (is_aligned(target, 8)) {
    *reinterpret_cast<uint2*>(target) = words;
  } else if (is_aligned(target, 4)) {  // a cache's pages
    reinterpret_cast<uint32_t*>(target)[0] = words.x;
    reinterpret_cast<uint32_t*>(target)[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      target[i] = static_cast<uint8_t>(words.x >> (8 * i));
      target[4 + i] = static_cast<uint8_t>(words.y >> (8 * i));
    }
  }
}

}  // namespace cupymla::mla_cache
