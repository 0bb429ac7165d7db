// Bringing global memory into L2 without waiting for it.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The line that holds the address (PTX ISA, "prefetch").
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// `bytes`, a multiple of 16, from an address that is one (PTX ISA, "cp.async.bulk.prefetch"; sm_90).
__device__ __forceinline__ void prefetch_l2(const void* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

}  // namespace cupymla
