// What one CTA of a cluster hands to others that only wait for it: it says itself how many bytes their mbarriers are to
// expect, and stores them there (PTX ISA, "mbarrier.arrive", "st.async").
#pragma once

#include "cluster_exchange.cuh"

namespace cupymla {

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

}  // namespace cupymla
