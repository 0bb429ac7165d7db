// Thread-block clusters: who is who, the cluster's barrier, and what CTAs hand each other through shared memory and
// mbarriers (PTX ISA, "Cluster of cooperating thread arrays", "barrier.cluster", "mapa", "st.async", "mbarrier.arrive",
// "mbarrier.try_wait", scope .cluster).
#pragma once

#include "barrier.cuh"
#include "types.cuh"

namespace cupymla {

// This CTA's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// CTAs in the cluster.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Publishes this thread's writes to the cluster. Every thread of the cluster that has not exited must arrive.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Waits for those arrivals and sees what they published.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where `address`, of this CTA's shared memory, lies in the CTA of that rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ float cluster_load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ int32_t cluster_load_int32(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float4 cluster_load_float4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// As `cluster_rank`, but read again each time: that is kept, and spilled, where registers are few.
__device__ __forceinline__ uint32_t asked_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of the cluster that has not exited must arrive; behind `fence_mbarrier_init` of the thread that made
// the mbarriers. `cluster_wait` waits for it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// `address` as `cluster_address` gives it.
__device__ __forceinline__ void cluster_store_float(uint32_t address, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Stores in the background. Both addresses as `cluster_address` gives them, in the same CTA; the mbarrier there gets 16
// bytes, and whoever waits for it sees the data, by an ordinary `wait` too (PTX ISA, "st.async").
__device__ __forceinline__ void cluster_store_async_float4(uint32_t address, float x, float y, float z, float w,
                                                           uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address),
               "f"(x), "f"(y), "f"(z), "f"(w), "r"(mbarrier_address)
               : "memory");
}

// Arrives at another CTA's mbarrier. Says that this thread has read something, or has written what the asynchronous
// proxy reads, behind that proxy's fence: CUTLASS's PipelineUmmaConsumerAsync arrives like this for products of a pair.
// To publish writes to ordinary reads would cost a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive_after_reads_at(uint32_t mbarrier_address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier_address) : "memory");
}

// Arrives at another CTA's mbarrier; publishes this thread's accesses, and those it has synchronised with, to the
// cluster.
__device__ __forceinline__ void cluster_arrive_at(uint32_t mbarrier_address) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mbarrier_address) : "memory");
}

// Waits at this CTA's own mbarrier for arrivals from the cluster and sees what they published.
__device__ __forceinline__ void cluster_wait_at(Mbarrier& barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(&barrier.state)), "r"(parity)
        : "memory");
  }
}

// Arrives at a CTA's mbarrier, which is to expect as many bytes. Address as `cluster_address` gives it.
__device__ __forceinline__ void cluster_arrive_and_expect_at(uint32_t mbarrier_address, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(mbarrier_address), "r"(bytes)
               : "memory");
}

// As `cluster_store_async_float4`, one number of 4 bytes.
__device__ __forceinline__ void cluster_store_async_int32(uint32_t address, int32_t x, uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(address), "r"(x),
               "r"(mbarrier_address)
               : "memory");
}

// As `cluster_store_async_float4`, one number of 4 bytes.
__device__ __forceinline__ void cluster_store_async_uint32(uint32_t address, uint32_t x, uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(x),
               "r"(mbarrier_address)
               : "memory");
}

// As `cluster_store_async_float4`, two numbers of 4 bytes.
__device__ __forceinline__ void cluster_store_async_uint2(uint32_t address, uint32_t x, uint32_t y,
                                                          uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "r"(x), "r"(y), "r"(mbarrier_address)
               : "memory");
}

// As `cluster_store_async_float4`, one number of 4 bytes.
__device__ __forceinline__ void cluster_store_async_float(uint32_t address, float x, uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x),
               "r"(mbarrier_address)
               : "memory");
}

}  // namespace cupymla
