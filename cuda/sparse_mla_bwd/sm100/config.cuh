// Numbers of the sm_100a sparse MLA backward kernel, and the budgets they must keep.
#pragma once

#include "../../common/integers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, bool kPartialsArg>
struct Config {
  static constexpr bool kPartials = kPartialsArg;  // whether every slot's dKV row is stored on its own
  static constexpr int kDQk = kDQkArg;             // channels of a key
  static constexpr int kDV = 512;                  // channels of a value: the first ones of the key
  static constexpr int kCluster = 2;               // CTAs that share a query: half of the channels each
  static constexpr int kHeads = 128;               // query heads of a pass: M of the products
  static constexpr int kSlots = 64;                // slots of a block
  static constexpr int kOwnSlots = kSlots / kCluster;  // whose P and dS a CTA works out
  static constexpr int kTileColumns = 64;          // 16-bit elements in a 128-byte swizzled row

  // A CTA has four of the eight tiles of value channels; the first has the RoPE tile too.
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kOwnTiles = kValueTiles / kCluster;
  static constexpr bool kHasRope = kDQk > kDV;
  static constexpr int kRopeTile = kOwnTiles;  // its place among a CTA's tiles
  static constexpr int kTiles = kOwnTiles + (kHasRope ? 1 : 0);
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kSlotTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kBoxHeads = 64;  // that one copy of Q or dO brings in
  static constexpr int kBoxBytes = kBoxHeads * static_cast<int>(kSwizzleRowBytes);

  // Columns of Tensor Memory. dKV takes the place of S and dP, which have been read by then.
  static constexpr int kQueryGradient = 0;
  static constexpr int kQueryGradientRope = kOwnTiles * kTileColumns;
  static constexpr int kScores = kQueryGradientRope + kTileColumns;
  static constexpr int kValueScores = kScores + kSlots;
  static constexpr int kKeyGradient = kScores;  // 128 channels, then 128 more
  static constexpr int kKeyGradientRope = kKeyGradient + 2 * kSlots;
  static constexpr int kTmemColumns = 512;

  static constexpr int kWarpgroup = 128;
  static constexpr int kWorkerThreads = 2 * kWarpgroup;
  static constexpr int kWorkerWarps = kWorkerThreads / 32;
  static constexpr int kThreads = kWorkerThreads + 64;
  static constexpr int kProducerWarp = kWorkerWarps, kMultiplyWarp = kWorkerWarps + 1;
  static constexpr int kOwnColumns = kOwnSlots / 2;  // slots that one worker thread has of its head

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == kWarpgroup, "a worker thread's lane of Tensor Memory is a head");
  static_assert(kKeyGradientRope + kSlots <= kTmemColumns, "Tensor Memory");
  static_assert(kOwnColumns == 16 && kOwnTiles == 4);
};

}  // namespace cupymla::sparse_mla_bwd
