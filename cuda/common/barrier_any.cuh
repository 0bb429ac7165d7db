// Named barriers that also reduce (PTX ISA, "barrier.red").
#pragma once

#include "integers.cuh"

namespace cupymla {

// Waits until `threads` threads have come to named barrier `id`; whether `predicate` holds in any of them.
__device__ __forceinline__ bool named_barrier_any(uint32_t id, uint32_t threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n barrier.red.or.pred.aligned q, %1, %2, p;\n"
      " selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return any != 0;
}

}  // namespace cupymla
