// Looking at an mbarrier without waiting for it (PTX ISA, "mbarrier.test_wait").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Whether the phase of that parity has completed, now: unlike `Mbarrier::try_wait` it never suspends the thread.
__device__ __forceinline__ bool has_completed(const Mbarrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_address(&barrier.state)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace cupymla
