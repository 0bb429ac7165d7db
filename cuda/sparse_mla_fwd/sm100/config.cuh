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
  static constexpr int kSlots = 128;          // slots of a KV block; each CTA gathers the keys of half of them
  static constexpr int kKeyTiles = kDQk / sm100::kTileColumns;
  static constexpr int kValueTiles = kDV / sm100::kTileColumns;
  static constexpr bool kHasRope = kKeyTiles > kValueTiles;  // a last key tile that is no value

  // A block is four stages of the ring, each two tiles of 64 slots: keys first, values later (storage.cuh).
  static constexpr int kStageTiles = 2;
  static constexpr int kBlockStages = kValueTiles / kStageTiles;
  static constexpr uint32_t kStageBytes = kStageTiles * sm100::kTileBytes;
  static constexpr int kStages = kHasRope ? 10 : 12;
  static constexpr int kRopes = kHasRope ? 2 : 0;
  static constexpr int kChunks = kBlockStages / kCtas;  // products of 256 columns that make up the output

  // Tensor Memory of each CTA. Lanes 0-63 have the left half of a product's columns, lanes 64-127 the right half; of Q
  // both have the CTA's heads.
  //
  //   column   0 ........ 127 | 128 ...... 255 | 256 ...... 319          | 320 ...... 511
  //            O, chunk 0     | O, chunk 1     | S                       | Q, tiles 0 to 5
  //   0-63     channels 0-127 | 128-255        | slots of CTA 0's keys   | two channels a column
  //   64-127   256-383        | 384-511        | slots of CTA 1's keys   | the same
  static constexpr uint32_t kOutputColumn = 0;
  static constexpr uint32_t kChunkColumns = 128;
  static constexpr uint32_t kOutputColumns = kChunks * kChunkColumns;
  static constexpr uint32_t kScoresColumn = kOutputColumn + kOutputColumns;
  static constexpr uint32_t kScoresColumns = kSlots / kCtas;
  static constexpr uint32_t kQueryColumn = kScoresColumn + kScoresColumns;
  static constexpr uint32_t kQueryTileColumns = sm100::kTileColumns / 2;
  static constexpr int kTmemTiles = 6;                            // of Q; the others stay in shared memory
  static constexpr int kSharedTiles = kKeyTiles - kTmemTiles;
  static constexpr int kQueryStages = kTmemTiles / kStageTiles;   // through which they come
  static constexpr uint32_t kTmemColumns = 512;

  static constexpr int kSoftmaxWarps = 4, kEpilogueWarps = 4, kKeyWarps = 2;
  static constexpr int kSoftmaxThreads = 32 * kSoftmaxWarps, kEpilogueThreads = 32 * kEpilogueWarps;
  static constexpr int kEpilogueWarp = kSoftmaxWarps;  // the first of them
  static constexpr int kMmaWarp = kEpilogueWarp + kEpilogueWarps;
  static constexpr int kKeyWarp = kMmaWarp + 1, kValueWarp = kKeyWarp + kKeyWarps;
  static constexpr int kThreads = 32 * (kValueWarp + 1);

  // topk_length is read for so many queries at once (lengths.cuh), by the warp of a CTA whose products another issues.
  static constexpr uint32_t kLengths = 16, kLengthBatches = 2;
  static constexpr uint32_t kReaderRank = 1;  // that CTA, in the cluster
  static constexpr uint32_t kRoleWarps = kMmaWarp + kKeyWarps + 1;  // of each CTA, without that of the products

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kQueryColumn + kTmemTiles * kQueryTileColumns <= kTmemColumns && kTmemColumns <= sm100::kTmemColumns);
  static_assert(kSlots == kCtas * sm100::kGroupSlots && kBlockStages == kCtas * kChunks);
  static_assert(kKeyWarps == kStageTiles, "a tile each");
  static_assert(kTmemTiles % kStageTiles == 0 && kTmemTiles < kKeyTiles);
};

}  // namespace cupymla::sparse_mla_fwd
