// What the CTAs of a cluster hand each other during their work: stores into another CTA's shared memory, and mbarriers
// that say they are there (PTX ISA, "st", "mbarrier.arrive", "mbarrier.try_wait", scope .cluster).
#pragma once

#include "barrier.cuh"
#include "cluster.cuh"

namespace cupymla {

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

}  // namespace cupymla
