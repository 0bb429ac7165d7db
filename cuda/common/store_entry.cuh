// A predicated store of 16 bytes (PTX ISA, "Predicated Execution").
#pragma once

#include "types.cuh"

namespace cupymla {

// As `store_uint4`, where the entry is not negative. Under a predicate, whatever the compiler makes of a condition: a
// branch for each store would keep the instructions around it apart.
__device__ __forceinline__ void store_uint4_of_entry(int32_t entry, uint8_t* address, const uint4& words) {
  asm volatile(
      "{ .reg .pred there; setp.ge.s32 there, %0, 0; @there st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(entry),
      "l"(address), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
      : "memory");
}

}  // namespace cupymla
