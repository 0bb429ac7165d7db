// A CTA's number in its cluster, asked for wherever it is wanted (PTX ISA, "%cluster_ctarank").
#pragma once

#include "integers.cuh"

namespace cupymla {

// As `cluster_rank`, but read again each time: that is kept, and spilled, where registers are few.
__device__ __forceinline__ uint32_t asked_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace cupymla
