// Numbers of the attention of a single CTA, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, bool kPartialsArg, int kQueriesArg = 1, bool kPackedArg = false>
struct Config : sm90::Warpgroups<2, 40, 232> {
  static constexpr bool kPartials = kPartialsArg;    // whether every entry's dKV row is stored on its own
  static constexpr bool kPacked = kPackedArg;        // in 16 bits a column
  static constexpr int kDQk = kDQkArg;               // channels of a key
  static constexpr int kDV = 512;                    // channels of a value: the first ones of the key
  static constexpr int kHeads = 64;                  // query heads per CTA: one wgmma M
  static constexpr int kQueries = kQueriesArg;       // neighbouring queries whose heads they are
  static constexpr int kQueryHeads = kHeads / kQueries;
  static constexpr int kTileKeys = 64;               // entries per KV block
  static constexpr int kTileColumns = 64;            // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kHalfTiles = kValueTiles / 2; // column tiles whose gradients one consumer computes
  static constexpr bool kHasRope = kKeyTiles > kValueTiles;
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);

  // A KV block arrives in parts, so that the first products start before its last rows are in.
  static constexpr int kParts = 4;
  static __host__ __device__ constexpr int part_begin(int part) { return (part * kKeyTiles + kParts - 1) / kParts; }

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kQueries == 1 || ((kQueries == 2 || kQueries == 4) && kPartials == kPacked),
                "a consumer warp's sixteen rows of heads are one query's; rows of dKV are added, or packed");
  static_assert(kPartials || !kPacked);
  static_assert(kHeads == kTileKeys, "query, key and probability tiles share one size");
  static_assert(part_begin(0) == 0 && part_begin(kParts) == kKeyTiles);
};

}  // namespace cupymla::sparse_mla_bwd
