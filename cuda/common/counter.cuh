// Counting arrivals in global memory, with the order between CTAs that goes with it (PTX ISA, "atom", "Memory
// Consistency Model").
#pragma once

#include "types.cuh"

namespace cupymla {

// Adds one and returns what was there. What this thread's CTA wrote before the barrier in front of this call is seen by
// whoever reads a later value, and the other way round.
__device__ __forceinline__ uint32_t arrive_at(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The same in rounds of `arrivals`: the last one of a round leaves zero (PTX ISA, "atom", ".inc").
__device__ __forceinline__ uint32_t arrive_in_rounds(uint32_t* counter, uint32_t arrivals) {
  uint32_t before;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(arrivals - 1)
               : "memory");
  return before;
}

// What is there now; orders nothing (PTX ISA, "ld.relaxed").
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Adds without waiting for what was there (PTX ISA, "red").
__device__ __forceinline__ void add_relaxed(uint32_t* counter, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

}  // namespace cupymla
