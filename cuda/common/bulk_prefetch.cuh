// Bringing many bytes in a row into L2 by one instruction, from compute capability 9.0 on.
#pragma once

#include "integers.cuh"

namespace cupymla {

// Address and size are multiples of 16 (PTX ISA, "cp.async.bulk.prefetch").
__device__ __forceinline__ void bulk_prefetch_l2(const void* first, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(bytes) : "memory");
}

}  // namespace cupymla
