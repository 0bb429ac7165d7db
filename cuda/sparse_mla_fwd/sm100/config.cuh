// Numbers of the sm_100a sparse MLA forward kernel, and the budgets they must keep.
#pragma once

#include "../../common/sm100/slot_gather.cuh"
#include "../../common/sm100/tmem.cuh"

namespace cupymla::sparse_mla_fwd {

template <int kDQkArg, bool kSplitArg>
struct Config {
  static constexpr int kCtas = 2;
  static constexpr bool kSplit = kSplitArg;   // whether the pairs of a cluster share the slots of a query
  static constexpr int kMaxCluster = kSplit ? 16 : kCtas;
  static constexpr int kDQk = kDQkArg;        // channels of a key
  static constexpr int kDV = 512;             // channels of a value: the first ones of the key
  static constexpr int kHeads = 64;           // query heads of a CTA; the pair has twice as many
  static constexpr int kPairHeads = kCtas * kHeads;
  static constexpr int kSlots = 256;          // slots of a KV block
  static constexpr int kHalfSlots = kSlots / kCtas;  // whose keys a CTA gathers; a last block may have so many in all
  static constexpr int kKeyTiles = kDQk / sm100::kTileColumns;
  static constexpr int kPairTiles = kDV / sm100::kTileColumns / kCtas;  // value tiles of a CTA
  static constexpr int kStageTiles = 2;       // tiles of 64 rows that a stage of the ring holds
  static constexpr int kChunks = kPairTiles / kStageTiles;  // products of 256 columns that make up the output
  static constexpr uint32_t kStageBytes = kStageTiles * sm100::kTileBytes;
  static constexpr int kStages = kDQk == 576 ? 7 : 8;

  // Tensor Memory of each CTA: lanes 0-63 have the left half of a product's columns, lanes 64-127 the right half.
  //
  //   column   0 ........ 127 | 128 ...... 255 | 256 ...... 383 | 384 ...... 511
  //   lanes    O, chunk 0     | O, chunk 1     | S              | (free)
  //   0-63     channels 0-127 | 128-255        | slots of CTA 0's keys
  //   64-127   256-383        | 384-511        | slots of CTA 1's keys
  static constexpr uint32_t kOutputColumn = 0;
  static constexpr uint32_t kChunkColumns = 128;
  static constexpr uint32_t kOutputColumns = kChunks * kChunkColumns;
  static constexpr uint32_t kScoresColumn = kOutputColumn + kOutputColumns;
  static constexpr uint32_t kScoresColumns = kHalfSlots;
  static constexpr uint32_t kTmemColumns = 512;

  static constexpr int kWarpgroup = 128;
  static constexpr int kSoftmaxWarps = 8, kEpilogueWarps = 4;
  static constexpr int kSoftmaxThreads = 32 * kSoftmaxWarps, kEpilogueThreads = 32 * kEpilogueWarps;
  static constexpr int kEpilogueWarp = kSoftmaxWarps;  // the first of them
  static constexpr int kMmaWarp = kEpilogueWarp + kEpilogueWarps;
  static constexpr int kProducerWarp = kMmaWarp + 1, kProducerWarps = 3;
  static constexpr int kThreads = 32 * (kProducerWarp + kProducerWarps);
  static constexpr int kSoftmaxRegisters = 168, kEpilogueRegisters = 80, kIssueRegisters = 96;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kScoresColumn + kScoresColumns <= kTmemColumns && kTmemColumns <= sm100::kTmemColumns);
  static_assert(kHalfSlots * kSwizzleRowBytes == kStageBytes, "a stage holds one tile of keys");
  static_assert(kThreads == 4 * kWarpgroup);
  static_assert((2 * kSoftmaxRegisters + kEpilogueRegisters + kIssueRegisters) * kWarpgroup <= 65536, "register file");
};

}  // namespace cupymla::sparse_mla_fwd
