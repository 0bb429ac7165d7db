// Division of 64-bit indices that are mostly small: it takes about a hundred instructions in 64 bits, twenty in 32.
#pragma once

#include "integers.cuh"

namespace cupymla {

// The quotient of numbers that are not negative.
__device__ __forceinline__ int64_t quotient(int64_t number, int64_t divisor) {
  if (static_cast<uint64_t>(number | divisor) >> 32 == 0) {
    return static_cast<uint32_t>(number) / static_cast<uint32_t>(divisor);
  }
  return number / divisor;
}

}  // namespace cupymla
