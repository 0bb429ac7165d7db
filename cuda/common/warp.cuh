// The lanes of a warp: one elected for all (PTX ISA, "elect.sync"; sm_90), and running sums.
#pragma once

#include "types.cuh"

namespace cupymla {

// True in one lane of the warp, of which all lanes must come here.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// The sum over lanes 0 to `lane`, this one's included. All lanes take part.
__device__ __forceinline__ uint32_t warp_scan(uint32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t lower = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += lower;
  }
  return value;
}

}  // namespace cupymla
