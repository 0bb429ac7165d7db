// Numbers of the attention of a 2-CTA cluster, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, int kPartialsArg>
struct ClusterConfig : sm90::Warpgroups<2, 24, 240> {
  static constexpr int kCluster = 2;
  static constexpr bool kPartials = kPartialsArg != 0;  // whether every entry's dKV row is stored on its own
  static constexpr bool kPacked = kPartialsArg == 2;    // in 16 bits a column
  static constexpr int kQueries = 1;
  static constexpr int kDQk = kDQkArg;             // channels of a key
  static constexpr int kDV = 512;                  // channels of a value: the first ones of the key
  static constexpr int kHeads = 128;               // query heads of a head block
  static constexpr int kOwnHeads = kHeads / 2;     // whose P and dS a CTA makes
  static constexpr int kHeadTile = 32;             // neighbouring heads that one CTA has
  static constexpr int kTileKeys = 64;             // entries per KV block
  static constexpr int kTileColumns = 64;          // 16-bit elements in a 128-byte swizzled row

  // A CTA has half of the columns: of the values, and of the RoPE's.
  static constexpr int kColumns = kDV / 2;
  static constexpr int kValueTiles = kColumns / kTileColumns;
  static constexpr bool kHasRope = kDQk > kDV;
  static constexpr int kRopeColumns = 32;
  static constexpr int kRopeRowBytes = kRopeColumns * 2;
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(!kHasRope || kDQk - kDV == 2 * kRopeColumns);
  static_assert(kHeads == kConsumers * 2 * kHeadTile,
                "a consumer has a head tile of its CTA's, and one of the other's");
};

}  // namespace cupymla::sparse_mla_bwd
