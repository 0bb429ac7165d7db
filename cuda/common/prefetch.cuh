// Bringing global memory into L2 without waiting for it.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The line that holds the address (PTX ISA, "prefetch").
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace cupymla
