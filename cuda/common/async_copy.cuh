// Copies from global to shared memory that complete in the background: cp.async by threads, cp.async.bulk by ranges of
// bytes, and the L2 policies that go with them (PTX ISA, "cp.async", "cp.async.bulk", "createpolicy").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// L2 policy that keeps the lines touched by a gather for as long as it can.
__device__ __forceinline__ uint64_t l2_policy_evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies 16 bytes, or writes 16 zero bytes without touching `source` when `take` is false.
__device__ __forceinline__ void copy_async_16_or_zero(uint32_t destination, const void* source, bool take,
                                                      uint64_t l2_policy) {
  const uint32_t source_bytes = take ? 16u : 0u;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(source_bytes), "l"(l2_policy)
               : "memory");
}

// L2 policy that lets lines go first: for data that nobody reads a second time.
__device__ __forceinline__ uint64_t l2_policy_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// kBytes, 16, 8 or 4, between addresses that are multiples of it; only the first `bytes` (0..kBytes) are read, and
// zeros written for the others. 16 bytes go past L1 and bring 128 into L2.
template <int kBytes>
__device__ __forceinline__ void stream_copy_or_zeros(uint32_t destination, const void* source, uint32_t bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(destination), "l"(source), "r"(bytes),
                 "n"(kBytes)
                 : "memory");
  }
}

// The same with a policy, bringing nothing else into L2.
template <int kBytes>
__device__ __forceinline__ void stream_copy_or_zeros(uint32_t destination, const void* source, uint32_t bytes,
                                                     uint64_t l2_policy) {
  static_assert(kBytes == 16, "only what goes past L1 has a policy");
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
               "r"(bytes), "l"(l2_policy)
               : "memory");
}

// The operation where %0 is not 0. Without a branch: ptxas puts idle loads in front of copies that a branch leads to.
#define CUPYMLA_WHERE_WANTED(operation) \
  "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %0, 0;\n @wanted " operation ";\n}"

// kBytes, 16, 8 or 4, between addresses that are multiples of it, where `wanted`. 16 bytes go past L1 and bring 128
// into L2.
template <int kBytes>
__device__ __forceinline__ void stream_copy_if(bool wanted, uint32_t destination, const void* source) {
  if constexpr (kBytes == 16) {
    asm volatile(CUPYMLA_WHERE_WANTED("cp.async.cg.shared.global.L2::128B [%1], [%2], 16")::"r"(
                     static_cast<uint32_t>(wanted)),
                 "r"(destination), "l"(source)
                 : "memory");
  } else {
    asm volatile(CUPYMLA_WHERE_WANTED("cp.async.ca.shared.global [%1], [%2], %3")::"r"(static_cast<uint32_t>(wanted)),
                 "r"(destination), "l"(source), "n"(kBytes)
                 : "memory");
  }
}

// The same with a policy.
template <int kBytes>
__device__ __forceinline__ void stream_copy_if(bool wanted, uint32_t destination, const void* source,
                                               uint64_t l2_policy) {
  static_assert(kBytes == 16, "only what goes past L1 has a policy");
  asm volatile(CUPYMLA_WHERE_WANTED("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%1], [%2], 16, %3")::"r"(
                   static_cast<uint32_t>(wanted)),
               "r"(destination), "l"(source), "l"(l2_policy)
               : "memory");
}

#undef CUPYMLA_WHERE_WANTED

// Closes the group of all copies this thread has issued since the last group; it may be empty.
__device__ __forceinline__ void stream_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `kPending` latest groups of this thread are unfinished.
template <int kPending>
__device__ __forceinline__ void stream_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// With an L2 policy, as `l2_policy_evict_first` makes one.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes, Mbarrier& full,
                                          uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(smem_address(destination)),
      "l"(source), "r"(bytes), "r"(smem_address(&full)), "l"(l2_policy)
      : "memory");
}

}  // namespace cupymla
