// Where P and dS of all entries lie between the kernels `p_ds` and `dq_dkv`: of each query of a launch and block of 64
// entries, for either half of 128 heads a tile of P and one of dS, heads as rows, swizzled as products read them.
//
// Entries of a tile have other places than in their block: of 32, a thread of a quad has two neighbours of every eight,
// and these eight are kept side by side, so that they leave without an exchange.
#pragma once

#include "../../common/swizzle.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kPdsKeys = 64;       // of a block
constexpr int kPdsHeads = 64;      // of a tile
constexpr int kPdsGroups = 2;      // of heads
constexpr int kPdsTileBytes = kPdsHeads * static_cast<int>(kSwizzleRowBytes);
constexpr int kPdsBlockBytes = kPdsGroups * 2 * kPdsTileBytes;
static_assert(kPdsKeys * 2 == kSwizzleRowBytes);

// The entry of a block at a place of its tiles.
__device__ __forceinline__ int32_t entry_of_place(int32_t place) {
  return place / 32 * 32 + place / 2 % 4 * 8 + place / 8 % 4 * 2 + place % 2;
}

// Of the launch's query number `place`.
__device__ __forceinline__ uint8_t* stored_p_ds(const Parameters& params, uint32_t place, int32_t block) {
  const int64_t blocks = (params.topk + kPdsKeys - 1) / kPdsKeys;
  return params.p_ds + (place * blocks + block) * kPdsBlockBytes;
}

// Behind all tiles: how many entries of a query either half of the heads has P and dS of. Whoever writes to topk_length
// between the stages, nothing is read that was not written.
__device__ __forceinline__ int32_t* stored_entries(const Parameters& params, uint32_t place) {
  return reinterpret_cast<int32_t*>(stored_p_ds(params, params.query_end - params.query_begin, 0)) +
         place * kPdsGroups;
}

}  // namespace cupymla::sparse_mla_bwd
