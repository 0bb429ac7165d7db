// Tensor copies between global and shared memory by descriptor (PTX ISA, "cp.async.bulk.tensor").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// The driver's CUtensorMap as the device sees it: 128 opaque bytes, passed by value as a __grid_constant__.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

__device__ __forceinline__ void tma_prefetch_descriptor(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Box at (c0, c1, c2, c3), innermost first; elements outside the tensor read as zero and count as copied bytes.
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap& map, Mbarrier& full, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(smem_address(destination)), "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(&full)), "r"(c0),
      "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same, with an L2 policy as `l2_policy_evict_first` makes one.
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap& map, Mbarrier& full, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(l2_policy)
      : "memory");
}

}  // namespace cupymla
