// Named barriers that some warps wait at and others only pass (PTX ISA, "barrier.arrive").
#pragma once

#include "integers.cuh"

namespace cupymla {

// Arrives at named barrier `id` without waiting; `threads` counts those that arrive and those that wait.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cupymla
