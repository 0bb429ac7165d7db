// Shared memory, and who waits for what.
//
//   time   warp w (private ring)                            all warps
//    |                                                      fetch b of the first phase -> registers
//    |     first half of the warps: copy stage 0 of its tile                                         (T)
//    |     second half, meanwhile the first half stages 1 .. kStages-1: copy stages 0 .. kStages-1
//    |                                                      decode b of this phase -> one buffer of vectors
//    |                                                      fetch b of the next phase -> registers   (A)
//    v     wait for the oldest stage, multiply, refill it
//          ... until the phase's chunks are through
//          (next phase: back to decoding, for the other buffer)
//          sums -> partial                                                                         (B)
//                                                           add partials in order, write c           (C)
//          (next pass or item: back to decoding; where b stays the same, to A)
//
// A whole call (whole.cuh) has one pass, and begins otherwise:
//
//   time   first quarter of the warps                       all others
//    |     fetch b of the first phase, copy stage 0         wait                                     (T)
//    |     copy stages 1 .. kStages-1                       fetch b, copy stages 0 .. kStages-1
//    v     one vector: where c is, alpha, bias -> registers
//          decode b, and on as above
//
// barrier          | who              | what it says
// __syncwarp       | a warp           | every lane's copies of a stage are in; every lane is done with a stage
// T: 5             | all              | the first warps have asked for their first stages, and the others begin; the
//                  |                  | zeros of the kernel for one vector are there, which warp 0 writes
// A: 1 to 4        | a group of warps | its vectors of this phase are in; it reads those of the phase before no more,
//                  |                  | whose buffer it decodes to next
// __syncthreads B  | all              | every warp's sums are in `partial`; no vectors are read, which other groups may
//                  |                  | overwrite from now on
// __syncthreads C  | all              | nobody reads `partial` any more
#pragma once

#include "config.cuh"

namespace cupymla::nvfp4_gemv {

constexpr uint32_t kGroupBarriers = 1;  // named barrier of the first group
constexpr uint32_t kOrderBarrier = 5;

template <class C>
struct alignas(128) Storage {
  static constexpr bool kBlocks = C::kScaling == Scaling::blocks;
  static constexpr bool kColumns = C::kScaling == Scaling::columns;

  // 16-byte piece p of row r is at place p ^ stage_swizzle(r).
  struct alignas(128) Stage {
    uint8_t codes[C::kTileRows][C::kRowBytes];
    uint8_t scales[C::kTileRows][C::kRowScales];
  };

  Stage ring[C::kWarps][C::kStages];
  float partial[C::kWarps][C::kTileRows][C::kMostColumns];
  // Scaling::blocks: the scales of the stage at hand as floats.
  alignas(16) float scales[kBlocks ? C::kWarps : 1][kBlocks ? C::kTileRows : 1][kBlocks ? C::kRowScales : 4];
  // Scaling::columns: what lanes read whose column is another piece's.
  alignas(128) uint8_t zeros[kColumns ? 512 : 16];

  // The rest of shared memory: two buffers of kVectorBytes, for phases in turn; see vectors.cuh.
  __device__ __forceinline__ uint8_t* vectors(int32_t buffer);
};

template <class C>
constexpr int kVectorBytes = (C::kSharedBytes - static_cast<int>(sizeof(Storage<C>))) / 2 / 512 * 512;

template <class C>
__device__ __forceinline__ uint8_t* Storage<C>::vectors(int32_t buffer) {
  return reinterpret_cast<uint8_t*>(this + 1) + buffer * kVectorBytes<C>;
}

// To be called by all threads of the CTA.
template <class C>
__device__ __forceinline__ void write_zeros(Storage<C>& storage) {
  if constexpr (C::kScaling == Scaling::columns) {
    if (threadIdx.x < sizeof(storage.zeros) / 16) {
      reinterpret_cast<uint4*>(storage.zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Rows r and r + 1 meet in one quarter of a 128-bit read, rows r to r + 7 in a 32-bit one: the former need places that
// differ in bit 2, the latter eight different ones.
__device__ __forceinline__ constexpr uint32_t stage_swizzle(uint32_t row) {
  return ((row & 1u) << 2) | ((row >> 1) & 3u);
}

}  // namespace cupymla::nvfp4_gemv
