// A predicated store (PTX ISA, "Predicated Execution").
#pragma once

#include "types.cuh"

namespace cupymla {

// Without a branch, which would keep the instructions around it apart. `wanted`: any bit of it.
__device__ __forceinline__ void store_if(uint32_t wanted, float* address, float value) {
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %0, 0;\n @wanted st.global.f32 [%1], %2;\n}" ::"r"(wanted),
      "l"(address), "f"(value)
      : "memory");
}

}  // namespace cupymla
