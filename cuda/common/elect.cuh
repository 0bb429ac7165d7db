// One thread for its warp (PTX ISA, "elect.sync"; sm_90).
#pragma once

#include "integers.cuh"

namespace cupymla {

// True in one lane of the warp, of which all lanes must come here.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

}  // namespace cupymla
