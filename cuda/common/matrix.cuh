// 8x8 tiles of 16-bit elements as MMA fragments hold them: lane l has elements 2 * (l % 4) and the next of row l / 4
// (PTX ISA, "ldmatrix", sm_75; "stmatrix", sm_90; "movmatrix", sm_75).
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Loads four tiles; lane l gives the address of row l % 8 of tile l / 8, and register i gets tile i.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&tiles)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(address)
               : "memory");
}

// The same, each tile transposed: register i gets elements of column l / 4, rows 2 * (l % 4) and the next.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&tiles)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(address)
               : "memory");
}

// Stores four tiles; lane l gives the address of row l % 8 of tile l / 8, and registers r0..r3 hold tiles 0..3.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// A tile transposed among the lanes of a warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t tile) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(tile));
  return transposed;
}

}  // namespace cupymla
