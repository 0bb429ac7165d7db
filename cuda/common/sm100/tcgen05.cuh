// The Tensor Core of Blackwell (PTX ISA, "TensorCore 5th Generation Family Instructions", "tcgen05.mma", ".commit",
// ".fence"; sm_100f). kCtas is 2 where the even CTA of a pair issues for both.
#pragma once

#include "../barrier.cuh"
#include "descriptors.cuh"
#include "tmem.cuh"

namespace cupymla::sm100 {

// Before a barrier by which other threads learn that this thread's tcgen05 operations are through.
__device__ __forceinline__ void fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// After a barrier, before tcgen05 operations that rely on those of other threads.
__device__ __forceinline__ void fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// D = A B, plus D when `accumulate`; fp16 or bf16 operands in shared memory. One thread.
template <int kCtas = 1>
__device__ __forceinline__ void mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate)), "n"(kCtas)
      : "memory");
}

// The same with A in Tensor Memory: a lane is a row, a column holds two neighbours along K.
template <int kCtas = 1>
__device__ __forceinline__ void mma_f16_from_tmem(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                                                  bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate)), "n"(kCtas)
      : "memory");
}

// The weight-stationary form, of one CTA: m is 32, 64 or 128 and n 64, 128 or 256. Where m is 64, columns n/2 to n of D
// lie in lanes 64 to 127, at the addresses of columns 0 to n/2; where it is 32, each quarter of the lanes has n/4.
// Without a collector hint B is read from shared memory every time, and collector buffer b0 is given up.
__device__ __forceinline__ void mma_ws_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// The same with A in Tensor Memory, m lanes for each group of lanes that has columns of D: every group multiplies the
// rows that lie in its own lanes, so that A is stored once for each, or different matrices are.
__device__ __forceinline__ void mma_ws_f16_from_tmem(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                                                     bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.ws.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// Arrives at a barrier of this CTA once all that this thread has given the Tensor Core is done.
template <int kCtas = 1>
__device__ __forceinline__ void commit(Mbarrier& barrier) {
  asm volatile("tcgen05.commit.cta_group::%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   smem_address(&barrier.state)),
               "n"(kCtas)
               : "memory");
}

// The same at the barrier that lies there in each CTA of the pair; `ctas` has their bits among the cluster's ranks.
template <int kCtas = 2>
__device__ __forceinline__ void commit_to_pair(Mbarrier& barrier, uint16_t ctas = 3) {
  asm volatile(
      "tcgen05.commit.cta_group::%2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
          smem_address(&barrier.state)),
      "h"(ctas), "n"(kCtas)
      : "memory");
}

}  // namespace cupymla::sm100
