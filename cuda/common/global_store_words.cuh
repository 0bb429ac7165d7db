// As global_store.cuh, of four words.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The address is a multiple of 16 bytes.
__device__ __forceinline__ void store_uint4(uint8_t* address, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

}  // namespace cupymla
