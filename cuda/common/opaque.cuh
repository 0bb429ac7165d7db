// Values whose origin the compiler is not to know.
#pragma once

#include "integers.cuh"

namespace cupymla {

// An empty statement that might have changed the value: it stays in its register, for it cannot be computed again, and
// what depends on it is computed behind this point.
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int64_t& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void make_opaque(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void make_opaque(const uint8_t*& pointer) { asm volatile("" : "+l"(pointer)); }

}  // namespace cupymla
