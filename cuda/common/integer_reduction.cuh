// Integer operations on global memory that return nothing (PTX ISA, "red", "cp.reduce.async.bulk").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Adds modulo 2^64; the address is a multiple of 8 bytes.
__device__ __forceinline__ void reduce_add_uint64(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void reduce_or(uint32_t* address, uint32_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}

// Of floats that are not negative, whose bits have the same order.
__device__ __forceinline__ void reduce_max_positive(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(address), "r"(__float_as_uint(value)) : "memory");
}

// Adds integers in shared memory, `bytes` of them, modulo 2^32, in the background, as part of this thread's group of
// bulk stores (tma.cuh). Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_add_int32(int32_t* destination, const int32_t* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(destination),
               "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

}  // namespace cupymla
