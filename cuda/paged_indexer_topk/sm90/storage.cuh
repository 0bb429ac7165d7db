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
  // Heads of query tiles, then key tiles: see Places.
  uint8_t tiles[ThisConfig::kQueryBuffers * ThisConfig::kQueryBufferBytes +
                ThisConfig::kConsumers * ThisConfig::kRounds * ThisConfig::kKeyTileBytes];

  // In the order in which lanes take them: see `indexer_logits::weight_place`.
  alignas(16) float weights[ThisConfig::kQueryBuffers][ThisConfig::kQueries * ThisConfig::kHeads];
  int32_t ends[ThisConfig::kQueryBuffers][ThisConfig::kQueries];  // keys that a query sees; 0 for one that is not there
  alignas(16) float k_scale[ThisConfig::kHasScales ? ThisConfig::kMostStages : 1][ThisConfig::kTileKeys];
  uint32_t there[ThisConfig::kMostStages][2];  // a bit per key: whether its block is in the cache

  Mbarrier q_full[ThisConfig::kQueryBuffers], q_free[ThisConfig::kQueryBuffers];
  Mbarrier k_full[ThisConfig::kMostStages], k_free[ThisConfig::kMostStages];
};

static_assert(sizeof(Storage) <= 227 * 1024);

// Where heads and key tiles are. Most launches have few queries: their buffers are smaller, and stages begin further in
// front. All CTAs of a launch have the same.
struct Places {
  uint8_t* tiles;
  uint32_t query_buffer;  // bytes
  uint32_t first_stage;   // byte
  uint32_t rounds;        // stages of a consumer

  __device__ __forceinline__ Places(Storage& storage, int32_t queries)
      : tiles(storage.tiles),
        query_buffer(queries <= ThisConfig::kFewQueries ? ThisConfig::kFewQueryBytes : ThisConfig::kQueryBufferBytes),
        first_stage(query_buffer * ThisConfig::kQueryBuffers),
        rounds(queries <= ThisConfig::kFewQueries ? ThisConfig::kMostRounds : ThisConfig::kRounds) {}

  __device__ __forceinline__ uint8_t* heads(uint32_t buffer, int column) const {
    return tiles + buffer * query_buffer + column * (ThisConfig::kQueryBufferBytes / ThisConfig::kColumnTiles);
  }
  __device__ __forceinline__ uint8_t* keys(uint32_t stage, int column) const {
    return tiles + first_stage + stage * ThisConfig::kKeyTileBytes + column * ThisConfig::kTileKeys * ThisConfig::kSpan;
  }
};

// The stages of one key warp and one consumer, in turn.
struct StageRing {
  const uint32_t first, end;
  uint32_t stage;
  uint32_t full = 0;  // parity

  __device__ __forceinline__ StageRing(const Places& places, uint32_t number)
      : first(number), end(places.rounds * ThisConfig::kConsumers), stage(number) {}

  __device__ __forceinline__ void advance() {
    stage += ThisConfig::kConsumers;
    if (stage >= end) stage = first, full ^= 1u;
  }
};

}  // namespace cupymla::paged_indexer
