// Global and shared memory: prefetches into L2, and loads and stores of 16 bytes that stay whole (PTX ISA, "prefetch",
// "ld", "st").
#pragma once

#include "types.cuh"

namespace cupymla {

// The line that holds the address (PTX ISA, "prefetch").
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Sixteen bytes; the address, as `smem_address` gives it, is a multiple of sixteen.
__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// Four neighbouring floats; the address is a multiple of 16 bytes.
__device__ __forceinline__ void store_float4(float* address, const float (&values)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}

// The address is a multiple of 16 bytes.
__device__ __forceinline__ void store_uint4(uint8_t* address, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace cupymla
