// Copies of a range of bytes between global and shared memory (PTX ISA, "cp.async.bulk"). Addresses and sizes are
// multiples of 16. Stores are gathered into groups as those of tiles are: see tma_store.cuh.
#pragma once

#include "barrier.cuh"

namespace cupymla {

__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes, Mbarrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(destination)),
               "l"(source), "r"(bytes), "r"(smem_address(&full))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(smem_address(source)), "r"(bytes)
               : "memory");
}

// To the same place of every CTA of the cluster whose bit is set in `ctas`, each of whose mbarriers gets the bytes; with
// an L2 policy, as `l2_policy_evict_first` makes one.
__device__ __forceinline__ void bulk_load_to_cluster(void* destination, const void* source, uint32_t bytes,
                                                     Mbarrier& full, uint16_t ctas, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4, %5;" ::"r"(smem_address(destination)),
      "l"(source), "r"(bytes), "r"(smem_address(&full)), "h"(ctas), "l"(l2_policy)
      : "memory");
}

// With an L2 policy.
__device__ __forceinline__ void bulk_store(void* destination, const void* source, uint32_t bytes, uint64_t l2_policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(destination),
               "r"(smem_address(source)), "r"(bytes), "l"(l2_policy)
               : "memory");
}

}  // namespace cupymla
