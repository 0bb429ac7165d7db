// Reads of two or four numbers from another CTA's shared memory (PTX ISA, "ld").
#pragma once

#include "cluster.cuh"

namespace cupymla {

// Address as `cluster_address` gives it.
__device__ __forceinline__ float2 cluster_load_float2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

template <typename Values>
__device__ __forceinline__ Values cluster_load(uint32_t address) {
  if constexpr (sizeof(Values) == sizeof(float2)) {
    return cluster_load_float2(address);
  } else {
    return cluster_load_float4(address);
  }
}

}  // namespace cupymla
