// Products of 4-bit matrices with a scale per block of K (PTX ISA, "tcgen05.mma", "Block Scaling", "Scale factor A/B
// matrices layout", "tcgen05.cp"; sm_100f). One CTA by itself.
//
// Scales lie in Tensor Memory: row r of a matrix in lane r % 32 of each quarter of the lanes and column r / 32, four
// neighbours along K in a word. 512 bytes [32][4][4] of the 128x4 layout are what one copy brings there.
#pragma once

#include "../barrier.cuh"
#include "../types.cuh"

namespace cupymla::sm100 {

// Shared-memory descriptor of rows of 16 bytes behind each other, not swizzled. Adding n to it moves it 16 n bytes on.
__device__ __forceinline__ uint64_t descriptor_16b(uint32_t address) {
  constexpr uint64_t kVersion = 1, kLeading = 1, kEightRows = 128 >> 4;
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | kLeading << 16 | kEightRows << 32 | kVersion << 46;
}

// Copies 32 rows of 16 bytes to four columns, in each quarter of the lanes. One thread; products that it issues later
// come after the copy.
__device__ __forceinline__ void copy_scales(uint32_t tmem, uint64_t descriptor) {
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(descriptor) : "memory");
}

// How block-scaled kinds multiply E2M1, both operands K-major: D[m, n] in float.
//   e8m0      scales are E8M0, else E4M3 without a sign
//   scale_id  which byte of a scale's word belongs to the first block: 0, or 2 with scales per 32
__host__ __device__ constexpr uint32_t instruction_e2m1(uint32_t m, uint32_t n, bool e8m0, uint32_t scale_id) {
  return scale_id << 4 | 1u << 7 | 1u << 10 | n / 8 << 17 | (e8m0 ? 1u : 0u) << 23 | m / 128 << 27 | scale_id << 29;
}

// D = A B, plus D when `accumulate`; a scale per 16 elements, four to a product. One thread.
__device__ __forceinline__ void mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                                          uint32_t b_scales, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
      " tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

// The same with a scale per 32 elements, two to a product.
__device__ __forceinline__ void mma_mxfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                                          uint32_t b_scales, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
      " tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(static_cast<uint32_t>(accumulate))
      : "memory");
}

}  // namespace cupymla::sm100
