// Reads of shared memory by address (PTX ISA, "ld").
#pragma once

#include "integers.cuh"

namespace cupymla {

// Sixteen bytes; the address, as `smem_address` gives it, is a multiple of sixteen.
__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace cupymla
