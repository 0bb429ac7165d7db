// Arrays of floats whose type is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/types.cuh"

namespace cupymla::nvfp4_gemv {

enum FloatType : int32_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

__device__ __forceinline__ float load_float(const uint8_t* array, int64_t index, int32_t type) {
  if (type == kFloat16) return __half2float(reinterpret_cast<const __half*>(array)[index]);
  if (type == kBfloat16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(array)[index]);
  return reinterpret_cast<const float*>(array)[index];
}

__device__ __forceinline__ void store_float(uint8_t* array, int64_t index, int32_t type, float value) {
  if (type == kFloat16) {
    reinterpret_cast<__half*>(array)[index] = __float2half_rn(value);
  } else if (type == kBfloat16) {
    reinterpret_cast<__nv_bfloat16*>(array)[index] = __float2bfloat16_rn(value);
  } else {
    reinterpret_cast<float*>(array)[index] = value;
  }
}

__device__ __forceinline__ bool takes_16_bytes(const void* address) {
  return (reinterpret_cast<uintptr_t>(address) & 15) == 0;
}

// kCount neighbours, a multiple of 8, in as wide pieces as their address allows.
template <int kCount>
__device__ __forceinline__ void load_floats(float (&values)[kCount], const uint8_t* array, int64_t index,
                                            int32_t type) {
  const uint8_t* source = array + index * (type == kFloat32 ? 4 : 2);
  if (!takes_16_bytes(source)) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) values[e] = load_float(array, index + e, type);
  } else if (type == kFloat32) {
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      const float4 piece = *reinterpret_cast<const float4*>(source + 4 * e);
      values[e] = piece.x, values[e + 1] = piece.y, values[e + 2] = piece.z, values[e + 3] = piece.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; e += 8) {
      const uint4 piece = *reinterpret_cast<const uint4*>(source + 2 * e);
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint8_t* word = reinterpret_cast<const uint8_t*>(&words[i / 2]);
        values[e + i] = load_float(word, i % 2, type);
      }
    }
  }
}

template <int kCount>
__device__ __forceinline__ void store_floats(uint8_t* array, int64_t index, int32_t type,
                                             const float (&values)[kCount]) {
  uint8_t* target = array + index * (type == kFloat32 ? 4 : 2);
  if (!takes_16_bytes(target)) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) store_float(array, index + e, type, values[e]);
  } else if (type == kFloat32) {
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      *reinterpret_cast<float4*>(target + 4 * e) =
          make_float4(values[e], values[e + 1], values[e + 2], values[e + 3]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < kCount; e += 8) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) store_float(reinterpret_cast<uint8_t*>(&words[i / 2]), i % 2, type, values[e + i]);
      *reinterpret_cast<uint4*>(target + 2 * e) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace cupymla::nvfp4_gemv
