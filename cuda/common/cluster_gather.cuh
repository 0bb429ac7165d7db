// Single words in the shared memory of a CTA of the cluster (PTX ISA, "st", "atom"); an address is `cluster_address`'s.
#pragma once

#include "types.cuh"

namespace cupymla {

// Adds and returns what was there; orders nothing.
__device__ __forceinline__ uint32_t cluster_add_relaxed(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
  return before;
}

__device__ __forceinline__ void cluster_store_uint64(uint32_t address, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// The low eight bits.
__device__ __forceinline__ void cluster_store_byte(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace cupymla
