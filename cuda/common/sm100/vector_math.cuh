// Two floats at a time (PTX ISA, "Floating Point Instructions", .f32x2; sm_100f).
#pragma once

#include "../types.cuh"

namespace cupymla::sm100 {

__device__ __forceinline__ uint64_t bits(float2 value) {
  uint64_t packed;
  asm("mov.b64 %0, {%1, %2};" : "=l"(packed) : "f"(value.x), "f"(value.y));
  return packed;
}

__device__ __forceinline__ float2 floats(uint64_t packed) {
  float2 value;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(value.x), "=f"(value.y) : "l"(packed));
  return value;
}

__device__ __forceinline__ float2 add(float2 a, float2 b) {
  uint64_t sum;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(sum) : "l"(bits(a)), "l"(bits(b)));
  return floats(sum);
}

__device__ __forceinline__ float2 multiply_add(float2 a, float2 b, float2 c) {
  uint64_t sum;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(sum) : "l"(bits(a)), "l"(bits(b)), "l"(bits(c)));
  return floats(sum);
}

}  // namespace cupymla::sm100
