// ldmatrix: a warp loads 8x8 tiles of 16-bit elements as MMA fragments (PTX ISA, "ldmatrix").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Four tiles; lane l gives the address of row l % 8 of tile l / 8, and registers 0..3 get tiles 0..3.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&tiles)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(address)
               : "memory");
}

}  // namespace cupymla
