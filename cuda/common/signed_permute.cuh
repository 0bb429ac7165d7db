// Bytes of words by selectors with sign bits (PTX ISA, "prmt"), which `__byte_perm` leaves out.
#pragma once

#include "integers.cuh"

namespace cupymla {

// Bytes of two words by a selector of four nibbles, of which one with bit 3 gives the byte's sign eight times.
__device__ __forceinline__ uint32_t signed_permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

}  // namespace cupymla
