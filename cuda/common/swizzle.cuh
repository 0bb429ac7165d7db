// The swizzles of 128 and 64 bytes that TMA writes and wgmma reads (PTX ISA, "Shared memory matrix layout: swizzling
// modes").
#pragma once

#include "integers.cuh"

namespace cupymla {

constexpr uint32_t kSwizzleRowBytes = 128;   // one row of a swizzled tile: 64 16-bit elements
constexpr uint32_t kSwizzleAtomBytes = 1024; // eight rows, after which the pattern repeats

// Byte offset of 16-byte chunk `chunk` (0..7) of row `row` in a tile whose base is 1024-byte aligned.
__device__ __forceinline__ constexpr uint32_t swizzle_128(uint32_t row, uint32_t chunk) {
  return row * kSwizzleRowBytes + ((chunk ^ (row & 7u)) << 4);
}

// The same of rows of 64 bytes, of which eight take kNarrowSwizzleAtomBytes; `chunk` is 0..3.
constexpr uint32_t kNarrowSwizzleRowBytes = 64;
constexpr uint32_t kNarrowSwizzleAtomBytes = 512;

__device__ __forceinline__ constexpr uint32_t swizzle_64(uint32_t row, uint32_t chunk) {
  return row * kNarrowSwizzleRowBytes + ((chunk ^ (row >> 1 & 3u)) << 4);
}

}  // namespace cupymla
