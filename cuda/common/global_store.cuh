// Stores to global memory that stay whole: a compiler may make four of a float4's (PTX ISA, "st").
#pragma once

namespace cupymla {

// Four neighbouring floats; the address is a multiple of 16 bytes.
__device__ __forceinline__ void store_float4(float* address, const float (&values)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}

}  // namespace cupymla
