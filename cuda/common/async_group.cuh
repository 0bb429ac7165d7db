// cp.async in groups: each thread commits what it has copied so far and waits until few groups are unfinished
// (PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group"; sm_80).
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Copies 16 bytes past L1, or writes 16 zero bytes without touching `source` when `take` is false.
__device__ __forceinline__ void stream_16_or_zero(uint32_t destination, const void* source, bool take) {
  const uint32_t source_bytes = take ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(source_bytes)
               : "memory");
}

// The same for 8 bytes, which only go through L1.
__device__ __forceinline__ void stream_8_or_zero(uint32_t destination, const void* source, bool take) {
  const uint32_t source_bytes = take ? 8u : 0u;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void stream_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void stream_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cupymla
