// Values that the compiler is to take for new, so that what depends on them is computed where it is needed.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The same number. What is computed from it cannot be moved ahead of this point, to be kept in registers meanwhile.
__device__ __forceinline__ int32_t pinned(int32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace cupymla
