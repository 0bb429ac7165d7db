// Where P and dS of all slots lie between the stages `weights` and `columns`: of each query of a launch and block of 64
// slots, for either half of 128 heads a tile of P and one of dS, heads as rows, swizzled as products read them.
//
// Slots of a tile have other places than in their block: of 32, a thread of a quad has two neighbours of every eight,
// and these eight are kept side by side, so that they leave without an exchange.
#pragma once

#include "../../common/swizzle.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kWeightSlots = 64;   // of a block
constexpr int kWeightHeads = 64;   // of a tile
constexpr int kWeightGroups = 2;   // of heads
constexpr int kWeightTileBytes = kWeightHeads * static_cast<int>(kSwizzleRowBytes);
constexpr int kWeightBlockBytes = kWeightGroups * 2 * kWeightTileBytes;
static_assert(kWeightSlots * 2 == kSwizzleRowBytes);

// The slot of a block at a place of its tiles.
__device__ __forceinline__ int32_t slot_of_place(int32_t place) {
  return place / 32 * 32 + place / 2 % 4 * 8 + place / 8 % 4 * 2 + place % 2;
}

// Of the launch's query number `place`.
__device__ __forceinline__ uint8_t* stored_weights(const Parameters& params, uint32_t place, int32_t block) {
  const int64_t blocks = (params.topk + kWeightSlots - 1) / kWeightSlots;
  return params.weights + (place * blocks + block) * kWeightBlockBytes;
}

// Behind all tiles: how many slots of a query either half of the heads has P and dS of. Whoever writes to topk_length
// between the stages, nothing is read that was not written.
__device__ __forceinline__ int32_t* stored_slots(const Parameters& params, uint32_t place) {
  return reinterpret_cast<int32_t*>(stored_weights(params, params.query_end - params.query_begin, 0)) +
         place * kWeightGroups;
}

}  // namespace cupymla::sparse_mla_bwd
