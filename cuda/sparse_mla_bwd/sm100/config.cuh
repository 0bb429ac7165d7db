// Numbers of the sm_100f sparse MLA backward kernels, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

// What a CTA pair works on at a time.
template <int kDQkArg, bool kPartialsArg, int kHeadsArg, int kTileKeysArg>
struct Shape {
  static constexpr bool kPartials = kPartialsArg;  // whether every entry's dKV row is stored on its own
  static constexpr int kDQk = kDQkArg;             // channels of a key
  static constexpr int kDV = 512;                  // channels of a value: the first ones of the key
  static constexpr int kCluster = 2;               // CTAs that share a query: half of the channels each
  static constexpr int kHeads = kHeadsArg;         // query heads of a head block
  static constexpr int kTileKeys = kTileKeysArg;   // entries of a block
  static constexpr int kKeyWords = kTileKeys / 32;  // words of one bit per entry
  static constexpr int kTileColumns = 64;          // 16-bit elements in a 128-byte swizzled row

  // A CTA has four of the eight tiles of value channels; the first has the RoPE tile too.
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kOwnTiles = kValueTiles / kCluster;
  static constexpr bool kHasRope = kDQk > kDV;
  static constexpr int kRopeTile = kOwnTiles;  // its place among a CTA's tiles
  static constexpr int kTiles = kOwnTiles + (kHasRope ? 1 : 0);
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kKeyTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kBoxHeads = 64;  // that one copy of Q or dO brings in
  static constexpr int kBoxBytes = kBoxHeads * static_cast<int>(kSwizzleRowBytes);

  static constexpr int kTmemColumns = 512;
  static constexpr int kWarpgroup = 128;
  static constexpr int kWorkerThreads = 2 * kWarpgroup;
  static constexpr int kWorkerWarps = kWorkerThreads / 32;
  static constexpr int kWorkerColumns = 16;  // of S and dP that one worker thread finishes, in its lane

  // dKV leaves in parts of 128 channels (64 of the RoPE) x 64 entries, through places in Tensor Memory.
  static constexpr int kPartKeys = 64;
  static constexpr int kHalves = kTileKeys / kPartKeys;
  static constexpr int kValueParts = kOwnTiles / 2 * kHalves;
  static constexpr int kRopeParts = kHalves;

  static constexpr int kReducerWarps = 4;
  static constexpr int kReducerWarp = kWorkerWarps;  // the first of them
  static constexpr int kProducerWarp = kReducerWarp + kReducerWarps, kMultiplyWarp = kProducerWarp + 1;
  static constexpr int kThreads = 32 * (kMultiplyWarp + 1);

  static constexpr int kSets = 4;  // of a block's tokens: reducers need them long after workers

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kOwnTiles == 4);
};

// 128 heads are the rows of S, 64 entries its columns.
template <int kDQkArg, bool kPartialsArg>
struct ManyHeads : Shape<kDQkArg, kPartialsArg, 128, 64> {
  using Base = Shape<kDQkArg, kPartialsArg, 128, 64>;
  static constexpr int kOwnColumns = Base::kTileKeys / Base::kCluster;  // entries whose P and dS a CTA works out

  // Columns of Tensor Memory. dKV of values takes the place of S and dP, which have been read by then: part 0 that of
  // S, part 1 that of dP. The RoPE's is part 2.
  static constexpr int kQueryGradient = 0;
  static constexpr int kQueryGradientRope = Base::kOwnTiles * Base::kTileColumns;
  static constexpr int kScores = kQueryGradientRope + Base::kTileColumns;
  static constexpr int kValueScores = kScores + Base::kTileKeys;
  static constexpr int kKeyGradient = kScores;
  static constexpr int kRopePart = Base::kValueParts;
  static constexpr int kHeld = Base::kPartKeys / 4;   // entries of a part that reducers keep until they have the next
  static constexpr int kPlaces = Base::kValueParts + (Base::kHasRope ? Base::kRopeParts : 0);

  static_assert(Base::kHeads == Base::kWarpgroup, "a worker thread's lane of Tensor Memory is a head");
  static_assert(kOwnColumns == 2 * Base::kWorkerColumns, "two warpgroups have a CTA's own columns");
  static_assert(kValueScores == kKeyGradient + Base::kPartKeys, "dP lies where part 1 of dKV does");
  static_assert(kKeyGradient + kPlaces * Base::kPartKeys <= Base::kTmemColumns, "Tensor Memory");
};

// 128 entries are the rows of S, 64 heads its columns: for queries with up to 64 heads.
template <int kDQkArg, bool kPartialsArg>
struct SmallHead : Shape<kDQkArg, kPartialsArg, 64, 128> {
  using Base = Shape<kDQkArg, kPartialsArg, 64, 128>;
  static constexpr int kOwnColumns = Base::kHeads / Base::kCluster;  // heads whose P and dS a CTA works out
  static constexpr int kPlaces = 3;                                  // for parts of dKV, a ring
  static constexpr int kHeld = 0;  // entries of a part, as above; here products are ahead of the reducers anyway

  // Columns of Tensor Memory.
  static constexpr int kQueryGradient = 0;  // 128 channels, 128 more, and the RoPE
  static constexpr int kQueryGradientRope = kQueryGradient + 2 * Base::kHeads;
  static constexpr int kScores = kQueryGradientRope + Base::kHeads;
  static constexpr int kValueScores = kScores + Base::kHeads;
  static constexpr int kKeyGradient = kValueScores + Base::kHeads;

  static_assert(Base::kTileKeys == Base::kWarpgroup, "a worker thread's lane of Tensor Memory is an entry");
  static_assert(kOwnColumns == 2 * Base::kWorkerColumns, "two warpgroups have a CTA's own columns");
  static_assert(kKeyGradient + kPlaces * Base::kPartKeys <= Base::kTmemColumns, "Tensor Memory");
  static_assert(kPlaces < Base::kValueParts, "the reducers are done with a block before the next one's products are");
};

}  // namespace cupymla::sparse_mla_bwd
