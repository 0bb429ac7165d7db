// Integer operations on global memory that return nothing, and additions to shared memory (PTX ISA, "red", "atom").
#pragma once

#include "types.cuh"

namespace cupymla {

// Adds modulo 2^64; the address is a multiple of 8 bytes.
__device__ __forceinline__ void reduce_add_int64(int64_t* address, int64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Adds modulo 2^32 to shared memory, whose address `smem_address` gives, and returns what was there.
__device__ __forceinline__ uint32_t shared_add(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void reduce_or(uint32_t* address, uint32_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}

// Of floats that are not negative, whose bits have the same order.
__device__ __forceinline__ void reduce_max_positive(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(address), "r"(__float_as_uint(value)) : "memory");
}

}  // namespace cupymla
