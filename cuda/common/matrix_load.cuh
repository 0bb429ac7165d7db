// ldmatrix: a warp loads 8x8 tiles of 16-bit elements as MMA fragments (PTX ISA, "ldmatrix").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Four tiles; lane l gives the address of row l % 8 of tile l / 8, and words 0..3 receive tiles 0..3. The inverse of
// `store_matrix_x4`.
__device__ __forceinline__ void load_matrix_x4(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

}  // namespace cupymla
