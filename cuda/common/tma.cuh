// Tensor copies between global and shared memory by descriptor (PTX ISA, "cp.async.bulk.tensor",
// "cp.async.bulk.wait_group").
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

// Brings that box into L2 (PTX ISA, "cp.async.bulk.prefetch.tensor").
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap& map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// As `tma_load_4d`, with an L2 policy as `l2_policy_evict_first` makes one.
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap& map, Mbarrier& full, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(l2_policy)
      : "memory");
}

// Box at (c0, c1), innermost first; what lies outside the tensor is not written.
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, const void* source, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(smem_address(source)), "r"(c0), "r"(c1)
               : "memory");
}

__device__ __forceinline__ void tma_load_2d(void* destination, const TensorMap& map, Mbarrier& full, int32_t c0,
                                            int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(smem_address(&full)), "r"(c0), "r"(c1)
      : "memory");
}

// Closes this thread's group of stores.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last `kGroups` groups have read their shared memory, or have been written as well.
template <uint32_t kGroups>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
template <uint32_t kGroups>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace cupymla
