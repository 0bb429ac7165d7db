// Arrays of floats whose type is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/integers.cuh"

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

}  // namespace cupymla::nvfp4_gemv
