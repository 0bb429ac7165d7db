// Shared memory and barriers of stages `dq` and `dk`. A consumer keeps 64 rows of one operand in registers and has sums
// of theirs: in `dq` the heads of a column tile, in `dk` keys. The other operand streams by: keys, or column tiles.
// Each tile is multiplied twice:
//
//   z     = kept streamed^T               64 rows x 64
//   sums += (a factor [z > 0]) streamed   the operand is made in registers, rounded once
//
// barrier   | arrivals                              | who waits     | what it says
// ----------+---------------------------------------+---------------+-----------------------------------------------
// kept_full | 32 lanes of the producer warp         | consumers     | what both consumers keep is there
// full[s]   | 32 lanes of the producer warp, and    | consumers     | a tile is in stage s, with its gradients; or
//           | one again with bulk copies' bytes     |               | there are no more
// free[s]   | 256 consumers                         | producer warp | stage s may be refilled
// landed    | one lane of the producer warp, with   | producer warp | a tile of which some rows have to become zero
//           | TMA's bytes                           |               | is there
// named 1   | 256 consumers                         | consumers     | `merged` is there (`dq`, where they share a tile)
//
// What is not finite must not meet a zero in a product. So the producer makes bad keys, and heads of rows that take no
// part, zero before consumers see them. Only such tiles go through `landed`.
//
//   consumer, tile i                            | meanwhile
//   --------------------------------------------+---------------------------------------
//   first product: wgmma                        | second product of tile i - 1; loads
//   done: let go of tile i - 1                  | products of the other consumer
//   operands of the second product; its wgmma   | products of the other consumer
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/sm90/index_products.cuh"
#include "channels.cuh"
#include "config.cuh"
#include "operand_scale.cuh"
#include "warp_roles.cuh"

namespace cupymla::indexer_loss_dense {

constexpr int kDTiles = kD / 64;

using Tile = uint8_t[kDTiles][kTileBytes];  // 64 rows, of keys or of heads; its address is a multiple of 1024

struct alignas(1024) DqStorage {
  static constexpr int kStages = 5;

  Tile kept[kConsumers];     // heads
  Tile streamed[kStages];    // keys
  alignas(16) float gradients[kStages][kConsumers][kRows][kTileKeys];
  alignas(16) float merged[kD / 2 + 2][RoleWarpgroups::kWarpgroup];  // what consumer 1 has, for consumer 0
  int32_t first[kStages];  // key of a tile; negative: there is no more
  Mbarrier kept_full, landed, full[kStages], free[kStages];
};

struct alignas(1024) DkStorage {
  static constexpr int kStages = 5;

  Tile kept[kConsumers];     // keys
  Tile streamed[kStages];    // heads
  alignas(16) float gradients[kStages][kRows][kBlockKeys];
  alignas(16) float weights[kStages][kColumns];  // times the scale of operands; 0 for heads that only fill up
  int32_t first[kStages];    // row of a tile; negative: there is no more
  uint32_t spoilt[kStages];  // a bit for each row of the tile
  Mbarrier kept_full, landed, full[kStages], free[kStages];
};

static_assert(sizeof(DqStorage) <= 227 * 1024 && sizeof(DkStorage) <= 227 * 1024);

template <typename Storage>
__device__ __forceinline__ void init_barriers(Storage& storage) {
  storage.kept_full.init(32);
  storage.landed.init(1);
  for (int stage = 0; stage < Storage::kStages; ++stage) {
    storage.full[stage].init(32 + 1);
    storage.free[stage].init(RoleWarpgroups::kConsumerThreads);
  }
  fence_mbarrier_init();
}

}  // namespace cupymla::indexer_loss_dense
