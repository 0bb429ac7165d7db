// Numbers of the sm_100f kernel of the backward's first phase, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

template <int kDQkArg>
struct Config {
  static constexpr int kDQk = kDQkArg;         // channels of a key
  static constexpr int kDV = 512;              // channels of out and dout
  static constexpr int kCluster = 2;           // CTAs that share a query
  static constexpr int kHeads = 64;            // query heads of a CTA: half of M of the pair's products
  static constexpr int kClusterHeads = kCluster * kHeads;
  static constexpr int kBlockKeys = 128;       // entries of a block: N of the products
  static constexpr int kCtaKeys = kBlockKeys / kCluster;    // whose rows a CTA gathers
  static constexpr int kTileColumns = 64;      // 16-bit elements in a 128-byte swizzled row
  static constexpr int kTiles = kDQk / kTileColumns;
  static constexpr int kTileBytes = 64 * static_cast<int>(kSwizzleRowBytes);  // 64 heads, or 64 entries
  static constexpr int kStages = 2;            // of gathered rows
  static constexpr int kAccumulators = 2;

  // Tensor Memory: of the 128 lanes the first 64 hold the CTA's heads with the block's first 64 entries, the others the
  // same heads with its last 64 (PTX ISA, layout of D for M = 128 over two CTAs).
  static constexpr int kScoreColumns = kBlockKeys / 2;
  static constexpr int kTmemColumns = kAccumulators * kScoreColumns;

  static constexpr int kWarpgroup = 128;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kLeftGatherWarp = 0, kRightGatherWarp = 1, kMultiplyWarp = 2, kQueryWarp = 3;
  static constexpr int kLeftTiles = (kTiles + 1) / 2;  // that the left gather warp brings in
  static constexpr int kScoreWarps = 4;
  static constexpr int kMostQueries = 4;  // of a pair

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == 64 && kCtaKeys == 64, "query and key tiles share one size");
  static_assert(kTmemColumns >= 32 && kTmemColumns <= 512 && (kTmemColumns & (kTmemColumns - 1)) == 0);
};

}  // namespace cupymla::sparse_mla_bwd_phase1
