// Column tiles, and blocks of keys that they are multiplied by.
//
// CUPYMLA_HEADS: heads of a row in a column tile, with those that only fill up, 16, 32 or 64: of the indexer in stages
// `dq` and `dk`, of MLA in `lse` and `target`.
#pragma once

#include "../../common/sm90/warpgroups.cuh"
#include "../../common/swizzle.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss_dense {

// A column tile: the heads of one row, or of several neighbouring ones, with those that only fill up.
constexpr int kColumns = 64;
constexpr int kHeads = CUPYMLA_HEADS;
constexpr int kRows = kColumns / kHeads;  // of a column tile
constexpr int kColumnGroups = kColumns / 8;
constexpr int kRowGroups = kHeads / 8;    // column groups of a row

constexpr int kTileKeys = 64;
constexpr int kConsumers = 2;
constexpr int kBlockKeys = kConsumers * kTileKeys;
constexpr uint32_t kTileBytes = 64 * kSwizzleRowBytes;  // 64 keys, or columns, of 64 channels
constexpr int kScores = 32;                             // of a thread, in a product of 64 x 64

static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64);

// Where a column tile lies.
struct ColumnTile {
  int32_t first_row, first_head;

  // Of all tiles of the row block, head tiles of one group of rows after the other.
  __device__ __forceinline__ ColumnTile(int32_t number, int32_t heads) {
    const int32_t head_tiles = (heads + kHeads - 1) / kHeads;
    first_row = number / head_tiles * kRows;
    first_head = number % head_tiles * kHeads;
  }
};

__device__ __forceinline__ int32_t column_tiles(int32_t rows, int32_t heads) {
  return (rows + kRows - 1) / kRows * ((heads + kHeads - 1) / kHeads);
}

}  // namespace cupymla::indexer_loss_dense
