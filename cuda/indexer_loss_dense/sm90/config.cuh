// Sizes that a variant fixes.
//
// CUPYMLA_STAGE: a number of `Stage`; `STAGES` in cupymla/ops/indexer_loss_dense/plan.py has the same. CUPYMLA_FP16: 1
// for fp16, 0 for bf16. CUPYMLA_D: channels of an index head, 64 or 128. CUPYMLA_D_QK: of an MLA head, 576 or 512.
// CUPYMLA_HEADS: heads of a row in a column tile, with those that only fill up, 16, 32 or 64: of the indexer in stages
// `dq` and `dk`, of MLA in `lse` and `target`.
#pragma once

#include "../../common/sm90/warpgroups.cuh"
#include "../../common/swizzle.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss_dense {

enum Stage { kMask, kLse, kTarget, kRowLoss, kDq, kDk, kRound };

constexpr int kStage = CUPYMLA_STAGE;
constexpr int kD = CUPYMLA_D;
constexpr int kDQk = CUPYMLA_D_QK;
constexpr bool kScaled = CUPYMLA_FP16 != 0;  // operands of gradients: bf16 has the exponents of fp32

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

static_assert(kD == 64 || kD == 128);
static_assert(kDQk == 576 || kDQk == 512);
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
