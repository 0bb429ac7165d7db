// Tensor Memory: 128 lanes of 512 columns of 32 bits per multiprocessor (PTX ISA, "TensorCore 5th Generation Family
// Instructions", "tcgen05.alloc", ".ld", ".st"; sm_100f). An address has the lane in its upper and the column in its
// lower 16 bits. kCtas is 2 where a CTA pair works together, in every instruction of the kernel.
#pragma once

#include "../barrier.cuh"

namespace cupymla::sm100 {

constexpr uint32_t kTmemColumns = 512;

// The address `lane` lanes below `address`.
__host__ __device__ constexpr uint32_t tmem_lane(uint32_t address, uint32_t lane) { return address + (lane << 16); }

// Allocates `columns`, a power of two from 32, and writes the address of the first to shared memory; a whole warp, in
// each CTA of a pair.
template <int kCtas = 1>
__device__ __forceinline__ void tmem_allocate(uint32_t* address, uint32_t columns) {
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_address(address)),
               "r"(columns), "n"(kCtas)
               : "memory");
}

// Says that this CTA will allocate no more, so that others on the multiprocessor may.
template <int kCtas = 1>
__device__ __forceinline__ void tmem_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas) : "memory");
}

template <int kCtas = 1>
__device__ __forceinline__ void tmem_free(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns), "n"(kCtas)
               : "memory");
}

__device__ __forceinline__ void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_stores() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// Loads and stores of columns of this thread's lane, by a whole warp, which reaches the 32 lanes of its place in the
// warpgroup: `address` names the first of these lanes.
__device__ __forceinline__ void tmem_load_8(uint32_t (&out)[8], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]), "=r"(out[7])
      : "r"(address)
      : "memory");
}

__device__ __forceinline__ void tmem_store_8(uint32_t address, const uint32_t (&in)[8]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {%0, %1, %2, %3, %4, %5, %6, %7};"
      ::"r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]), "r"(in[6]), "r"(in[7]),
      "r"(address)
      : "memory");
}

__device__ __forceinline__ void tmem_load_16(uint32_t (&out)[16], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15}, [%16];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]),
      "=r"(out[7]), "=r"(out[8]), "=r"(out[9]), "=r"(out[10]), "=r"(out[11]), "=r"(out[12]), "=r"(out[13]),
      "=r"(out[14]), "=r"(out[15])
      : "r"(address)
      : "memory");
}

__device__ __forceinline__ void tmem_store_16(uint32_t address, const uint32_t (&in)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15};"
      ::"r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]), "r"(in[6]), "r"(in[7]), "r"(in[8]),
      "r"(in[9]), "r"(in[10]), "r"(in[11]), "r"(in[12]), "r"(in[13]), "r"(in[14]), "r"(in[15]),
      "r"(address)
      : "memory");
}

__device__ __forceinline__ void tmem_load_32(uint32_t (&out)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]),
      "=r"(out[7]), "=r"(out[8]), "=r"(out[9]), "=r"(out[10]), "=r"(out[11]), "=r"(out[12]), "=r"(out[13]),
      "=r"(out[14]), "=r"(out[15]), "=r"(out[16]), "=r"(out[17]), "=r"(out[18]), "=r"(out[19]), "=r"(out[20]),
      "=r"(out[21]), "=r"(out[22]), "=r"(out[23]), "=r"(out[24]), "=r"(out[25]), "=r"(out[26]), "=r"(out[27]),
      "=r"(out[28]), "=r"(out[29]), "=r"(out[30]), "=r"(out[31])
      : "r"(address)
      : "memory");
}

__device__ __forceinline__ void tmem_store_32(uint32_t address, const uint32_t (&in)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31};"
      ::"r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]), "r"(in[6]), "r"(in[7]), "r"(in[8]),
      "r"(in[9]), "r"(in[10]), "r"(in[11]), "r"(in[12]), "r"(in[13]), "r"(in[14]), "r"(in[15]), "r"(in[16]),
      "r"(in[17]), "r"(in[18]), "r"(in[19]), "r"(in[20]), "r"(in[21]), "r"(in[22]), "r"(in[23]), "r"(in[24]),
      "r"(in[25]), "r"(in[26]), "r"(in[27]), "r"(in[28]), "r"(in[29]), "r"(in[30]), "r"(in[31]),
      "r"(address)
      : "memory");
}

// The same for any multiple of 8 columns of floats or words.
template <uint32_t kColumns, typename Word>
__device__ __forceinline__ void tmem_load(Word (&out)[kColumns], uint32_t address) {
  static_assert(kColumns % 8 == 0 && sizeof(Word) == 4);
  constexpr uint32_t kStep = kColumns % 32 == 0 ? 32 : kColumns % 16 == 0 ? 16 : 8;
#pragma unroll
  for (uint32_t at = 0; at < kColumns; at += kStep) {
    auto& part = *reinterpret_cast<uint32_t(*)[kStep]>(out + at);
    if constexpr (kStep == 32) tmem_load_32(part, address + at);
    if constexpr (kStep == 16) tmem_load_16(part, address + at);
    if constexpr (kStep == 8) tmem_load_8(part, address + at);
  }
}

template <uint32_t kColumns, typename Word>
__device__ __forceinline__ void tmem_store(uint32_t address, const Word (&in)[kColumns]) {
  static_assert(kColumns % 8 == 0 && sizeof(Word) == 4);
  constexpr uint32_t kStep = kColumns % 32 == 0 ? 32 : kColumns % 16 == 0 ? 16 : 8;
#pragma unroll
  for (uint32_t at = 0; at < kColumns; at += kStep) {
    auto& part = *reinterpret_cast<const uint32_t(*)[kStep]>(in + at);
    if constexpr (kStep == 32) tmem_store_32(address + at, part);
    if constexpr (kStep == 16) tmem_store_16(address + at, part);
    if constexpr (kStep == 8) tmem_store_8(address + at, part);
  }
}

// 16 lanes of 64 columns, by a whole warp; `address` names the first or the 17th lane of its place in the warpgroup.
// A quad of threads has lanes l = thread / 4 and l + 8; of every eight columns c, thread t has 2 (t % 4) and the next:
// out[4 (c / 8)] and [+ 1] of lane l, [+ 2] and [+ 3] of lane l + 8.
__device__ __forceinline__ void tmem_load_fragments(uint32_t (&out)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x8.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]), "=r"(out[4]), "=r"(out[5]), "=r"(out[6]),
        "=r"(out[7]), "=r"(out[8]), "=r"(out[9]), "=r"(out[10]), "=r"(out[11]), "=r"(out[12]), "=r"(out[13]),
        "=r"(out[14]), "=r"(out[15]), "=r"(out[16]), "=r"(out[17]), "=r"(out[18]), "=r"(out[19]), "=r"(out[20]),
        "=r"(out[21]), "=r"(out[22]), "=r"(out[23]), "=r"(out[24]), "=r"(out[25]), "=r"(out[26]), "=r"(out[27]),
        "=r"(out[28]), "=r"(out[29]), "=r"(out[30]), "=r"(out[31])
      : "r"(address)
      : "memory");
}

}  // namespace cupymla::sm100
