// Copies of what is read once, from global to shared memory in the background (PTX ISA, "cp.async"). Each thread
// gathers its copies into groups, and waits for groups in the order in which it closed them.
#pragma once

#include "barrier.cuh"

namespace cupymla {

// L2 policy that lets lines go first: for data that nobody reads a second time.
__device__ __forceinline__ uint64_t l2_policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes between addresses that are multiples of 16, past L1; only the first `bytes` (0..16) are read, and zeros
// written for the others.
__device__ __forceinline__ void stream_copy_16_or_zeros(uint32_t destination, const void* source, uint32_t bytes,
                                                        uint64_t l2_policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
               "r"(bytes), "l"(l2_policy)
               : "memory");
}

// The same without a policy, bringing 128 bytes into L2.
__device__ __forceinline__ void stream_copy_16_or_zeros(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// 16 bytes past L1 where `wanted`. Without a branch: ptxas puts idle loads in front of copies that a branch leads to.
__device__ __forceinline__ void stream_copy_16_if(bool wanted, uint32_t destination, const void* source,
                                                  uint64_t l2_policy) {
  asm volatile("{\n .reg .pred wanted;\n setp.ne.u32 wanted, %3, 0;\n"
               " @wanted cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(destination),
               "l"(source), "l"(l2_policy), "r"(static_cast<uint32_t>(wanted))
               : "memory");
}

// The same without a policy; 16, 8 or 4 bytes.
template <int kBytes>
__device__ __forceinline__ void stream_copy_if(bool wanted, uint32_t destination, const void* source) {
  if constexpr (kBytes == 16) {
    asm volatile("{\n .reg .pred wanted;\n setp.ne.u32 wanted, %2, 0;\n"
                 " @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(destination),
                 "l"(source), "r"(static_cast<uint32_t>(wanted))
                 : "memory");
  } else {
    asm volatile("{\n .reg .pred wanted;\n setp.ne.u32 wanted, %2, 0;\n"
                 " @wanted cp.async.ca.shared.global [%0], [%1], %3;\n}" ::"r"(destination), "l"(source),
                 "r"(static_cast<uint32_t>(wanted)), "n"(kBytes)
                 : "memory");
  }
}

// 8 bytes between addresses that are multiples of 8; the first `bytes` (0..8) are read.
__device__ __forceinline__ void stream_copy_8_or_zeros(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// 4 bytes between addresses that are multiples of 4; the first `bytes` (0..4) are read.
__device__ __forceinline__ void stream_copy_4_or_zeros(uint32_t destination, const void* source, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// Closes the group of all copies this thread has issued since the last group; it may be empty.
__device__ __forceinline__ void stream_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `kPending` latest groups of this thread are unfinished.
template <int kPending>
__device__ __forceinline__ void stream_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cupymla
