// stmatrix: a warp stores 8x8 tiles of 16-bit elements from MMA fragments (PTX ISA, "stmatrix").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// Four tiles; lane l gives the address of row l % 8 of tile l / 8, and registers r0..r3 hold tiles 0..3.
__device__ __forceinline__ void store_matrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace cupymla
