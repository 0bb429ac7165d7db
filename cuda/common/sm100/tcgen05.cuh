// Tensor Memory and the Tensor Core of Blackwell (PTX ISA, "TensorCore 5th Generation Instructions"; sm_100a), for one
// CTA by itself.
#pragma once

#include "../barrier.cuh"

namespace cupymla::sm100 {

// Allocates `columns`, a power of two from 32, and writes the address of the first to shared memory; a whole warp.
__device__ __forceinline__ void tmem_allocate(uint32_t* address, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_address(address)),
               "r"(columns)
               : "memory");
}

// Says that this CTA will allocate no more, so that others on the multiprocessor may.
__device__ __forceinline__ void tmem_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void tmem_free(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
}

// Before a barrier by which other threads learn that this thread's tcgen05 operations are through.
__device__ __forceinline__ void fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// After a barrier, before tcgen05 operations that rely on those of other threads.
__device__ __forceinline__ void fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// 32 columns of this thread's lane; a whole warp, which reaches the 32 lanes of its place in the warpgroup.
__device__ __forceinline__ void tmem_load_32(uint32_t (&out)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]),
        "=r"(out[7]), "=r"(out[8]), "=r"(out[9]), "=r"(out[10]), "=r"(out[11]), "=r"(out[12]), "=r"(out[13]),
        "=r"(out[14]), "=r"(out[15]), "=r"(out[16]), "=r"(out[17]), "=r"(out[18]), "=r"(out[19]), "=r"(out[20]),
        "=r"(out[21]), "=r"(out[22]), "=r"(out[23]), "=r"(out[24]), "=r"(out[25]), "=r"(out[26]), "=r"(out[27]),
        "=r"(out[28]), "=r"(out[29]), "=r"(out[30]), "=r"(out[31])
      : "r"(address)
      : "memory");
}

// D = A B, plus D when `accumulate`; fp16 or bf16 operands in shared memory. One thread.
__device__ __forceinline__ void mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %4, 0;\n"
      " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// Arrives at a barrier once all that this thread has given the Tensor Core is done.
__device__ __forceinline__ void commit(Mbarrier& barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   smem_address(&barrier.state))
               : "memory");
}

// Descriptor of a K-major operand in rows of 128 bytes, swizzled by 128 bytes, eight rows behind each other.
__device__ __forceinline__ uint64_t descriptor_128b(uint32_t address) {
  constexpr uint64_t kRowsOfEight = 1024 >> 4, kVersion = 1, kSwizzle128 = 2;
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | 1ull << 16 | kRowsOfEight << 32 | kVersion << 46 |
         kSwizzle128 << 61;
}

// Instruction descriptor: bf16 operands, both K-major, float accumulation.
constexpr uint32_t instruction_bf16(uint32_t m, uint32_t n) {
  return 1u << 4 | 1u << 7 | 1u << 10 | n / 8 << 17 | m / 16 << 24;
}

}  // namespace cupymla::sm100
