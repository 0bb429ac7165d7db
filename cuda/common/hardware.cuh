// What the emulation's model takes from the hardware: special registers, and the shared memory of a cluster's other
// CTAs (PTX ISA, "Special Registers", "getctarank", "ld", "st", "mbarrier").
#pragma once

#include "cluster.cuh"

namespace cupymla::hardware {

using cupymla::cluster_rank;
using cupymla::cluster_size;

#define CUPYMLA_SPECIAL_REGISTER(function, name)                    \
  __device__ __forceinline__ uint32_t function() {                  \
    uint32_t value;                                                 \
    asm volatile("mov.u32 %0, %%" name ";" : "=r"(value)); \
    return value;                                                   \
  }

CUPYMLA_SPECIAL_REGISTER(cluster_cta_x, "cluster_ctaid.x")
CUPYMLA_SPECIAL_REGISTER(cluster_cta_y, "cluster_ctaid.y")
CUPYMLA_SPECIAL_REGISTER(cluster_cta_z, "cluster_ctaid.z")
CUPYMLA_SPECIAL_REGISTER(cluster_extent_x, "cluster_nctaid.x")
CUPYMLA_SPECIAL_REGISTER(cluster_extent_y, "cluster_nctaid.y")
CUPYMLA_SPECIAL_REGISTER(lane_index, "laneid")
CUPYMLA_SPECIAL_REGISTER(dynamic_smem_bytes, "dynamic_smem_size")
CUPYMLA_SPECIAL_REGISTER(total_smem_bytes, "total_smem_size")
#undef CUPYMLA_SPECIAL_REGISTER

// Nanoseconds on a clock that all multiprocessors share.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// Where a shared-memory address of this CTA lies in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  return cluster_address(address, rank);
}

// The rank of the CTA that a shared-memory address lies in (PTX ISA, "getctarank").
__device__ __forceinline__ uint32_t rank_of_shared(uint32_t address) {
  uint32_t rank;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(rank) : "r"(address));
  return rank;
}

__device__ __forceinline__ uint32_t load_cluster_u8(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_cluster_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_cluster_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_cluster_16(uint32_t address, uint4 value) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Arrives at an mbarrier anywhere in the cluster, with release semantics for the cluster.
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier) { cluster_arrive_at(barrier); }

// Counts bytes as copied at an mbarrier anywhere in the cluster.
__device__ __forceinline__ void complete_bytes_in_cluster(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Ends this thread.
__device__ __forceinline__ void exit_thread() { asm volatile("exit;"); }

}  // namespace cupymla::hardware
