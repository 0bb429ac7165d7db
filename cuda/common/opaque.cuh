// Values that the compiler should keep rather than compute again.
#pragma once

#include "integers.cuh"

namespace cupymla {

// Hides where a value comes from, so that it stays in a register: an empty statement that might have changed it.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(int32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(int64_t& value) { asm volatile("" : "+l"(value)); }

}  // namespace cupymla
