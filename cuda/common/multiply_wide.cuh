// Products of 32-bit integers as 64-bit ones (PTX ISA, "mad"): a compiler that knows one factor before the other may
// widen it first, which takes three multiplications.
#pragma once

#include "integers.cuh"

namespace cupymla {

__device__ __forceinline__ int64_t multiply_add_wide(int32_t a, int32_t b, int64_t c) {
  int64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}

}  // namespace cupymla
