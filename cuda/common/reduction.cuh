// Additions to global memory that return nothing (PTX ISA, "red").
#pragma once

#include "types.cuh"

namespace cupymla {

// Adds four neighbouring floats; the address is a multiple of 16 bytes. Each float is added on its own.
__device__ __forceinline__ void reduce_add_float4(float* address, const float (&values)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
}

__device__ __forceinline__ void reduce_add_float(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

}  // namespace cupymla
