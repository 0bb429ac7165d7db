// Additions of ranges of shared memory to global memory in the background (PTX ISA, "cp.reduce.async.bulk").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Adds 32-bit integers, `bytes` of them, modulo 2^32, as part of this thread's group of bulk stores (tma.cuh). Both
// addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_add_int32(int32_t* destination, const int32_t* source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;" ::"l"(destination),
               "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

}  // namespace cupymla
