// What tcgen05.mma is told of its operands (PTX ISA, "Matrix Descriptors", "Instruction descriptor"; sm_100f).
// All matrices lie in rows of 128 bytes, 64 elements of 16 bits, swizzled by 128 bytes, eight rows behind each other.
#pragma once

#include "../types.cuh"

namespace cupymla::sm100 {

// Shared-memory descriptor: `leading` and `stride` are distances in bytes. Adding n to it moves it 16 n bytes on.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kVersion = 1, kSwizzle128 = 2;
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | kVersion << 46 | kSwizzle128 << 61;
}

// A row holds 64 neighbours along K. The next 16 of them lie 32 bytes on; the leading distance is not used.
__device__ __forceinline__ uint64_t descriptor_128b(uint32_t address) { return descriptor(address, 16, 1024); }

// A row holds 64 neighbours along M or N, rows run along K: the next 16 lie 2048 bytes on, the next 64 along M or N
// `block_bytes` on.
__device__ __forceinline__ uint64_t descriptor_128b_transposed(uint32_t address, uint32_t block_bytes) {
  return descriptor(address, block_bytes, 1024);
}

// How kind::f16 multiplies: D[m, n] in float = A B.
//   m, n        the shape, over both CTAs of a pair; K is 16
//   fp16        operands are fp16, else bf16
//   a_mn, b_mn  the operand's rows hold neighbours along M or N, not along K
__host__ __device__ constexpr uint32_t instruction_f16(uint32_t m, uint32_t n, bool fp16, bool a_mn = false,
                                                       bool b_mn = false) {
  const uint32_t operand = fp16 ? 0 : 1;
  return 1u << 4 | operand << 7 | operand << 10 | (a_mn ? 1u : 0u) << 15 | (b_mn ? 1u : 0u) << 16 | n / 8 << 17 |
         m / 16 << 24;
}

__host__ __device__ constexpr uint32_t instruction_bf16(uint32_t m, uint32_t n) {
  return instruction_f16(m, n, false);
}

}  // namespace cupymla::sm100
