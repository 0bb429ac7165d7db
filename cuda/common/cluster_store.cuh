// What one CTA of a cluster stores in another's shared memory in the background, number by number (PTX ISA,
// "st.async").
#pragma once

#include "integers.cuh"

namespace cupymla {

// As `cluster_store_async_float4`, one number of 4 bytes.
__device__ __forceinline__ void cluster_store_async_float(uint32_t address, float x, uint32_t mbarrier_address) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x),
               "r"(mbarrier_address)
               : "memory");
}

}  // namespace cupymla
