// Shared memory and barriers of the scoring kernel. `t` counts the key tiles of a CTA; all roles count alike.
//
// barrier    | arrivals                                | who waits           | what it says
// -----------+-----------------------------------------+---------------------+----------------------------------------
// q_full[b]  | 32 lanes of the query warp, and one     | consumers           | heads of a query tile, weights and
//            | again with TMA's bytes                  |                     | lengths are in buffer b
// q_free[b]  | every consumer warp                     | query warp          | buffer b may be refilled
// k_full[s]  | 32 lanes of a key warp by their copies, | consumer t % the    | key tile t, t % stages = s, is in
//            | one more for the words of `there`, with | number of consumers | stage s
//            | the bytes of tensor copies; that one    |                     |
//            | alone where each tile is in one block   |                     |
// k_free[s]  | 4 warps of that consumer                | key warp            | stage s may be refilled
//
// Before the roles part, __syncthreads. Nobody waits for what is not there: a CTA's tiles are known to all its warps,
// from the lengths, before the first one is loaded.
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::paged_indexer {

struct alignas(1024) Storage {
  uint8_t q[ThisConfig::kQueryBuffers][ThisConfig::kColumnTiles]
           [ThisConfig::kQueries * ThisConfig::kHeads * ThisConfig::kSpan];
  uint8_t k[ThisConfig::kStages][ThisConfig::kColumnTiles][ThisConfig::kTileKeys * ThisConfig::kSpan];

  // In the order in which lanes take them: see `indexer_logits::weight_place`.
  alignas(16) float weights[ThisConfig::kQueryBuffers][ThisConfig::kQueries * ThisConfig::kHeads];
  int32_t ends[ThisConfig::kQueryBuffers][ThisConfig::kQueries];  // keys that a query sees; 0 for one that is not there
  alignas(16) float k_scale[ThisConfig::kHasScales ? ThisConfig::kStages : 1][ThisConfig::kTileKeys];
  uint32_t there[ThisConfig::kStages][2];  // a bit per key: whether its block is in the cache

  Mbarrier q_full[ThisConfig::kQueryBuffers], q_free[ThisConfig::kQueryBuffers];
  Mbarrier k_full[ThisConfig::kStages], k_free[ThisConfig::kStages];
};

static_assert(sizeof(Storage) <= 227 * 1024);

}  // namespace cupymla::paged_indexer
