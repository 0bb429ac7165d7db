// The 128-byte swizzle that TMA writes and wgmma reads (PTX ISA, "Shared memory matrix layout: swizzling modes").
#pragma once

#include "types.cuh"

namespace cupymla {

constexpr uint32_t kSwizzleRowBytes = 128;   // one row of a swizzled tile: 64 16-bit elements
constexpr uint32_t kSwizzleAtomBytes = 1024; // eight rows, after which the pattern repeats

// Byte offset of 16-byte chunk `chunk` (0..7) of row `row` in a tile whose base is 1024-byte aligned.
__device__ __forceinline__ constexpr uint32_t swizzle_128(uint32_t row, uint32_t chunk) {
  return row * kSwizzleRowBytes + ((chunk ^ (row & 7u)) << 4);
}

}  // namespace cupymla
