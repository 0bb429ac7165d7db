// A predicated load (PTX ISA, "Predicated Execution", "ld").
#pragma once

#include "types.cuh"

namespace cupymla {

// A word, or 0. Neither a branch nor `.nc`: ptxas puts either where the word is used, behind waits for other loads.
__device__ __forceinline__ uint32_t load_if(bool wanted, const uint32_t* address) {
  uint32_t word;
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %1, 0;\n mov.u32 %0, 0;\n @wanted ld.global.u32 %0, [%2];\n}"
      : "=&r"(word)
      : "r"(static_cast<uint32_t>(wanted)), "l"(address)
      : "memory");
  return word;
}

}  // namespace cupymla
