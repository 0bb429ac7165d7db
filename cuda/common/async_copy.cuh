// cp.async: 16-byte copies from global to shared memory that complete in the background (PTX ISA, "cp.async").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// L2 policy that keeps the lines touched by a gather for as long as it can.
__device__ __forceinline__ uint64_t l2_policy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes, or writes 16 zero bytes without touching `source` when `take` is false.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t destination, const void* source, bool take,
                                                      uint64_t l2_policy) {
  const uint32_t source_bytes = take ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(source_bytes), "l"(l2_policy)
               : "memory");
}

}  // namespace cupymla
