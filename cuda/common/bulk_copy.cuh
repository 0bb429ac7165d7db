// Copies of a range of bytes from global to shared memory (PTX ISA, "cp.async.bulk"). Addresses and sizes are multiples
// of 16.
#pragma once

#include "barrier.cuh"

namespace cupymla {

// With an L2 policy, as `l2_policy_evict_first` makes one.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes, Mbarrier& full,
                                          uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(smem_address(destination)),
      "l"(source), "r"(bytes), "r"(smem_address(&full)), "l"(l2_policy)
      : "memory");
}

}  // namespace cupymla
