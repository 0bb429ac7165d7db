// Numbers of the sm_100f sparse MLA forward kernels, and the budgets they must keep.
#pragma once

#include "../../common/sm100/topk_gather.cuh"
#include "../../common/sm100/tmem.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr uint32_t kExchange = 1, kStagesRead = 2;  // named barriers
constexpr uint32_t kSharedMemoryLimit = 227 * 1024;

// What CTAs that work together take at a time, and how a CTA's memory is laid out for it.
template <int kDQkArg, bool kSplitArg, int kCtasArg, int kTileKeysArg, int kStageTilesArg, int kTmemTilesArg>
struct Shape {
  static constexpr int kCtas = kCtasArg;      // CTAs of an item: a pair, or one by itself
  static constexpr bool kSplit = kSplitArg;   // whether those of a cluster share the entries of a query
  static constexpr int kMaxCluster = kSplit ? 16 : kCtas;
  static constexpr int kDQk = kDQkArg;        // channels of a key
  static constexpr int kDV = 512;             // channels of a value: the first ones of the key
  static constexpr int kHeads = 64;           // query heads of a CTA
  static constexpr int kItemHeads = kCtas * kHeads;
  static constexpr int kTileKeys = kTileKeysArg;  // keys of a tile: top-k entries of a KV block
  static constexpr int kKeyTiles = kDQk / sm100::kTileColumns;
  static constexpr int kValueTiles = kDV / sm100::kTileColumns;
  static constexpr bool kHasRope = kKeyTiles > kValueTiles;  // a last key tile that is no value
  static constexpr int kRopes = kHasRope ? 2 : 0;            // places for it

  // A block's other tiles of 64 entries come in stages of a ring.
  static constexpr int kStageTiles = kStageTilesArg;
  static constexpr int kBlockStages = kValueTiles / kStageTiles;
  static constexpr uint32_t kStageBytes = kStageTiles * sm100::kTileBytes;

  // Tensor Memory of each CTA. Lanes 0-63 have the left half of a product's columns, lanes 64-127 the right half; of Q
  // both have the CTA's heads, two channels a column.
  static constexpr int kLaneHalves = 2;
  static constexpr int kChunks = 2;  // products of 256 columns that make up the output
  static constexpr uint32_t kOutputColumn = 0;
  static constexpr uint32_t kChunkColumns = 128;
  static constexpr uint32_t kOutputColumns = kChunks * kChunkColumns;
  static constexpr uint32_t kScoresColumn = kOutputColumn + kOutputColumns;
  static constexpr uint32_t kScoresColumns = kTileKeys / kLaneHalves;
  static constexpr uint32_t kQueryColumn = kScoresColumn + kScoresColumns;
  static constexpr uint32_t kQueryTileColumns = sm100::kTileColumns / 2;
  static constexpr int kTmemTiles = kTmemTilesArg;  // of Q; the others stay in shared memory
  static constexpr int kSharedTiles = kKeyTiles - kTmemTiles;
  static constexpr int kQueryStages = (kTmemTiles + kStageTiles - 1) / kStageTiles;  // through which they come
  static constexpr uint32_t kTmemColumns = 512;

  // Key warps have a tile of each stage.
  static constexpr int kSoftmaxWarps = 4, kEpilogueWarps = 4, kKeyWarps = kStageTiles;
  static constexpr int kSoftmaxThreads = 32 * kSoftmaxWarps, kEpilogueThreads = 32 * kEpilogueWarps;
  static constexpr int kEpilogueWarp = kSoftmaxWarps;  // the first of them
  static constexpr int kMmaWarp = kEpilogueWarp + kEpilogueWarps;
  static constexpr int kKeyWarp = kMmaWarp + 1;
  static constexpr int kLastWarp = kKeyWarp + kKeyWarps;
  static constexpr int kThreads = 32 * (kLastWarp + 1);

  // topk_length is read for so many queries at once (lengths.cuh).
  static constexpr uint32_t kLengths = 16, kLengthBatches = 2;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kQueryColumn + kTmemTiles * kQueryTileColumns <= kTmemColumns && kTmemColumns <= sm100::kTmemColumns);
  static_assert(kTileKeys == kCtas * sm100::kGroupKeys && kValueTiles % kStageTiles == 0);
  static_assert(kTmemTiles < kKeyTiles);
};

// A CTA pair takes 128 heads: all products are of both (cta_group::2), each CTA has 64 heads and gathers the keys
// of half of a block's entries. A block is four stages of two tiles: keys first, values later (storage.cuh).
//
//   column   0 ........ 127 | 128 ...... 255 | 256 ...... 319          | 320 ...... 511
//            O, chunk 0     | O, chunk 1     | S                       | Q, tiles 0 to 5
//   0-63     channels 0-127 | 128-255        | entries of CTA 0's keys | two channels a column
//   64-127   256-383        | 384-511        | entries of CTA 1's keys | the same
template <int kDQkArg, bool kSplitArg>
struct ManyHeads : Shape<kDQkArg, kSplitArg, 2, 128, 2, 6> {
  using Base = Shape<kDQkArg, kSplitArg, 2, 128, 2, 6>;
  static constexpr int kStages = Base::kHasRope ? 10 : 12;
  static constexpr int kFirstTmemTile = 0, kFirstSharedTile = Base::kTmemTiles;

  // topk_length is read by the warp of a CTA whose products another issues.
  static constexpr int kReaderWarp = Base::kMmaWarp;
  static constexpr uint32_t kReaderRank = 1;  // that CTA, in the cluster
  static constexpr uint32_t kRoleWarps = Base::kMmaWarp + Base::kKeyWarps + 1;  // of each CTA, without the products'

  // The first of the channels that a thread has, of those lanes, in columns of the output from `column` on.
  static __device__ __forceinline__ uint32_t channel(uint32_t lane_half, uint32_t column) {
    return lane_half * Base::kOutputColumns + column;
  }

  static_assert(Base::kBlockStages == Base::kCtas * Base::kChunks);
  static_assert(Base::kTmemTiles % Base::kStageTiles == 0);
};

// One CTA takes up to 64 heads (cta_group::1, the weight-stationary form, which keeps the Tensor Core busy with 64
// rows). What it gathers are keys and values at once. A block is two stages of four tiles: the operand of the product
// with 256 columns of values.
//
//   column   0 ........ 127 | 128 ...... 255 | 256 ... 287 | 288 ...... 511
//            O, chunk 0     | O, chunk 1     | S           | Q, the last seven tiles
//   0-63     channels 0-127 | 256-383        | entries 0-31 | two channels a column
//   64-127   128-255        | 384-511        | entries 32-63 | the same
template <int kDQkArg, bool kSplitArg>
struct SmallHead : Shape<kDQkArg, kSplitArg, 1, 64, 4, 7> {
  using Base = Shape<kDQkArg, kSplitArg, 1, 64, 4, 7>;
  static constexpr int kStages = Base::kHasRope ? 5 : 6;
  // Tiles in shared memory are multiplied first: they are there before the others are in Tensor Memory.
  static constexpr int kFirstSharedTile = 0, kFirstTmemTile = Base::kSharedTiles;

  static constexpr int kReaderWarp = Base::kLastWarp;
  static constexpr uint32_t kReaderRank = 0;
  static constexpr uint32_t kRoleWarps = Base::kMmaWarp + Base::kKeyWarps;

  static __device__ __forceinline__ uint32_t channel(uint32_t lane_half, uint32_t column) {
    return column / Base::kChunkColumns * (Base::kLaneHalves * Base::kChunkColumns) + lane_half * Base::kChunkColumns +
           column % Base::kChunkColumns;
  }

  static_assert(Base::kBlockStages == Base::kChunks, "a stage is the values of a chunk");
  static_assert(kFirstTmemTile < Base::kStageTiles, "a block's first stage needs Q in Tensor Memory too");
};

}  // namespace cupymla::sparse_mla_fwd
