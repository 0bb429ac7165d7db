// Matrix fragments of one warp: loads from shared memory (PTX ISA, "ldmatrix") and the 16 x 8 x 16 product of 16-bit
// operands with fp32 accumulation (PTX ISA, "mma.m16n8k16"; sm_80).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "barrier.cuh"

namespace cupymla {

// Four 8x8 tiles of 16-bit elements. Lane l gives the address of row l % 8 of tile l / 8; register i holds, of tile i,
// elements 2 * (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}

// The same with each tile transposed: register i holds elements of column l / 4, rows 2 * (l % 4) and the next.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&tiles)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(row_address)
               : "memory");
}

// accumulator[16 x 8] += a[16 x 16] b[16 x 8]. Lane l holds rows l / 4 and l / 4 + 8 of a and of the accumulator, and
// column l / 4 of b; along k and along the accumulator's columns it holds 2 * (l % 4) and the next.
template <typename Element>
__device__ __forceinline__ void multiply_add(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b_low,
                                             uint32_t b_high);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&accumulator)[4], const uint32_t (&a)[4],
                                                            uint32_t b_low, uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b_low,
                                                     uint32_t b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

}  // namespace cupymla
