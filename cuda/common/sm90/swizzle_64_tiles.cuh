// Tiles with rows of 64 bytes for wgmma, in the swizzle of that span (PTX ISA, "Shared memory matrix layout: swizzling
// modes"), and accumulators that start anew.
#pragma once

#include "wgmma.cuh"

namespace cupymla {

constexpr uint32_t kSwizzle64RowBytes = 64;        // one row of a swizzled tile: 32 16-bit elements
constexpr uint32_t kSwizzle64AtomBytes = 512;      // eight rows, after which the pattern repeats

// Byte offset of 16-byte chunk `chunk` (0..3) of row `row` in a tile whose base is 512-byte aligned.
__device__ __forceinline__ constexpr uint32_t swizzle_64(uint32_t row, uint32_t chunk) {
  return row * kSwizzle64RowBytes + ((chunk ^ (row >> 1 & 3u)) << 4);
}

namespace sm90 {

// As `matrix_descriptor`, but for the swizzle: 2 is 64 bytes.
__device__ __forceinline__ uint64_t swizzle_64_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kSwizzle64 = 2ull << 62;
  return kSwizzle64 | static_cast<uint64_t>((address & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<uint64_t>(kSwizzle64AtomBytes >> 4) << 32);
}

// Rows run along k: as `k_major_descriptor`.
__device__ __forceinline__ uint64_t swizzle_64_k_major_descriptor(uint32_t address) {
  return swizzle_64_descriptor(address, 16);
}

// Rows run along m or n, of which this is one tile: as `mn_major_descriptor`.
__device__ __forceinline__ uint64_t swizzle_64_mn_major_descriptor(uint32_t address) {
  return swizzle_64_descriptor(address, kSwizzle64AtomBytes);
}

// Accumulators that the next product does not read, whatever they held: without this the compiler carries what they
// held from one round of a loop to the next, and moves it about between products.
template <int kCount>
__device__ __forceinline__ void warpgroup_discard_operand(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(values[i])::"memory");
}

}  // namespace sm90

}  // namespace cupymla
