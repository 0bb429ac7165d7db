// Barriers: mbarriers in shared memory (PTX ISA, "mbarrier"), named barriers of the CTA (PTX ISA, "barrier"), and
// the fences that order the generic and the asynchronous proxy.
#pragma once

#include "types.cuh"

namespace cupymla {

// The 32-bit shared-window address that PTX .shared instructions take.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// One mbarrier object. A phase completes when `count` arrivals and all expected bytes are in.
struct alignas(8) Mbarrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&state)), "r"(count) : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&state)) : "memory");
  }

  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&state)), "r"(bytes)
                 : "memory");
  }

  // Arrives once every cp.async this thread has issued so far has landed; counts as one of the `count` arrivals.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&state)) : "memory");
  }

  // Whether the phase of that parity has completed; may suspend the thread for a while first.
  __device__ __forceinline__ bool try_wait(uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(&state)), "r"(parity)
        : "memory");
    return done != 0;
  }

  __device__ __forceinline__ void wait(uint32_t parity) {
    while (!try_wait(parity)) {
    }
  }
};

// Makes mbarrier initialisation visible to the asynchronous proxy and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's generic-proxy accesses to shared memory with asynchronous-proxy ones (wgmma, TMA), either way.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Named barrier `id` (0 is __syncthreads): waits until `threads` threads have arrived or synced.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits until `threads` threads have come to named barrier `id`; whether `predicate` holds in any of them.
__device__ __forceinline__ bool named_barrier_any(uint32_t id, uint32_t threads, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n barrier.red.or.pred.aligned q, %1, %2, p;\n"
      " selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return any != 0;
}

// Whether the phase of that parity has completed, now: unlike `Mbarrier::try_wait` it never suspends the thread.
__device__ __forceinline__ bool has_completed(const Mbarrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(smem_address(&barrier.state)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace cupymla
