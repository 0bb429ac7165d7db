// Shared memory and barriers of stages `lse` and `target`. A consumer has 64 rows of one operand in registers, and both
// consumers multiply them with each tile that streams by: in `lse` rows are MLA heads and tiles are of keys, in
// `target` rows are keys and tiles are of heads.
//
// barrier  | arrivals                                | who waits   | what it says
// ---------+-----------------------------------------+-------------+--------------------------------------------------
// full[b]  | 32 lanes of the producer warp, and one  | consumers   | a tile is in buffer b, with what goes with it; or
//          | again with TMA's bytes                  |             | there are no more
// free[b]  | 256 consumers                           | producer    | buffer b may be refilled
// order[c] | 128 threads of the other consumer       | consumer c  | the other's products are all but issued: c may
//          |                                         |             | issue its next
//
// The rows go through the first two buffers. They are let go of behind the first product: an arrival does not wait for
// `ldmatrix`. Both consumers wait for every buffer and free it.
//
//   consumer 0                      | tensor cores | consumer 1                    | producer
//   --------------------------------+--------------+-------------------------------+--------------------
//   issue tile i                    | tile i, of 0 | exponentials of tile i - 1    | load tile i + 2
//   exponentials of tile i, let go  | tile i, of 1 | issue tile i                  |
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/math.cuh"
#include "config.cuh"
#include "warp_roles.cuh"

namespace cupymla::indexer_loss_dense {

struct TeacherConfig : RoleWarpgroups {
  static constexpr int kDQk = CUPYMLA_D_QK;
  static_assert(kDQk == 576 || kDQk == 512);
  static constexpr int kTileKeys = 64;
  static constexpr int kConsumerHeads = 64;
  static constexpr int kTileBytes = indexer_loss_dense::kTileBytes;
  static constexpr int kKeyTiles = kDQk / 64;
  static constexpr int kBuffers = 3;
  static constexpr int kOrderTile = kKeyTiles - 2;  // behind it the other consumer's turn begins
  static __host__ __device__ constexpr bool ends_group(int tile) { return tile == kKeyTiles - 1; }
};

// What a buffer holds.
struct Streamed {
  int32_t first;  // row of a tile of heads, or key; negative: there is no more
  int32_t heads;  // from the tile's first head on
};

struct alignas(1024) TeacherStorage {
  uint8_t tiles[TeacherConfig::kBuffers][TeacherConfig::kKeyTiles][kTileBytes];
  alignas(16) Log2Lse lse[TeacherConfig::kBuffers][kColumns];  // of a tile of heads
  Streamed streamed[TeacherConfig::kBuffers];
  Mbarrier full[TeacherConfig::kBuffers], free[TeacherConfig::kBuffers];
  Mbarrier order[kConsumers];
};

static_assert(sizeof(TeacherStorage) <= 227 * 1024);

__device__ __forceinline__ void init_barriers(TeacherStorage& storage) {
  for (int buffer = 0; buffer < TeacherConfig::kBuffers; ++buffer) {
    storage.full[buffer].init(32 + 1);
    storage.free[buffer].init(TeacherConfig::kConsumerThreads);
  }
  for (auto& order : storage.order) order.init(TeacherConfig::kWarpgroup);
  fence_mbarrier_init();
}

}  // namespace cupymla::indexer_loss_dense
