// Shared memory and barriers of the kernel.
//
// barrier      | arrivals                              | who waits        | what it says
// -------------+---------------------------------------+------------------+-------------------------------------------
// run_full[b]  | one lane of the query warp            | key warp         | a run is in buffer b, its heads may not be
// q_full[b]    | 32 lanes of the query warp, and one   | consumers        | a run, its heads, weights and visible keys
//              | again with TMA's bytes                |                  | are in buffer b
// q_free[b]    | 256 consumer threads, the key warp    | query warp       | buffer b may be refilled
// k_full[s]    | one lane of the key warp, with TMA's  | consumer s % 2   | a key tile is in stage s
//              | bytes                                 |                  |
// k_free[s]    | 4 warps of consumer s % 2             | key warp         | stage s may be refilled
//
//   query warp          | key warp          | consumer 0                   | consumer 1
//   --------------------+-------------------+------------------------------+------------------------------
//   query tile i + 1    | key tile j + 4    | key tile j to registers      | group 5 of tile j - 1: issue
//   when it is free     | when it is free   | group 0: issue               | group 4: sum over heads, write
//                       |                   | group 7 of j - 2: sum, write | group 6: issue
//                       |                   | group 1: issue               | group 5: sum over heads, write
//
// From run to run it goes on like that: the last group of a run is summed behind the first products of the next, so
// that its buffer is held until then. Key tiles that no query of the tile sees are not loaded: consumers write -inf.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/ring.cuh"
#include "config.cuh"

namespace cupymla::indexer_logits {

// Consumers take key tiles in turn, from run to run, too, and each has stages of its own. `use` counts a
// consumer's key tiles, of which eight bits are enough.
__device__ __forceinline__ uint32_t key_stage(uint32_t use, uint32_t warpgroup_idx) {
  return use % ThisConfig::kOwnStages * ThisConfig::kConsumers + warpgroup_idx;
}
__device__ __forceinline__ uint32_t key_parity(uint32_t use) { return use / ThisConfig::kOwnStages & 1u; }

// Visible keys of a query: `begin` <= key < `end`.
struct Bounds {
  int32_t begin, end;
};

// Where a CTA's part of the line of query tiles begins, and how long it is.
struct WorkAssignment {
  int32_t batch, query_tile;
  int64_t at;  // from the query tile's beginning
  int64_t length;

  __device__ __forceinline__ void advance(int32_t query_tiles) {
    if (++query_tile < query_tiles) return;
    query_tile = 0;
    ++batch;
  }
};

// What a CTA does with one query tile: neighbouring key tiles that it scores, and some that it fills.
struct Run {
  int32_t batch, query_tile;  // batch -1: there is no further run
  int32_t first, end;         // key tiles to be scored
  int32_t turn;               // the consumer that takes the first one
  int32_t fill_first, fill_end;  // to be filled, counted without those from `skip_first` on
  int32_t skip_first, skipped;

  __device__ __forceinline__ int32_t first_query() const { return query_tile * ThisConfig::kQueries; }
  // The first key tile of a consumer, which takes every kConsumers'th.
  __device__ __forceinline__ int32_t first_of(int32_t warpgroup_idx) const {
    return first + (warpgroup_idx - turn + ThisConfig::kConsumers) % ThisConfig::kConsumers;
  }
};

struct alignas(1024) Storage {
  uint8_t q[ThisConfig::kQueryBuffers][ThisConfig::kColumnTiles]
           [ThisConfig::kQueries * ThisConfig::kHeads * ThisConfig::kSpan];
  uint8_t k[ThisConfig::kKeyStages][ThisConfig::kColumnTiles][ThisConfig::kKeyRows * ThisConfig::kSpan];

  // In the order in which lanes take them: see `weight_place`.
  alignas(16) float weights[ThisConfig::kQueryBuffers][ThisConfig::kQueries * ThisConfig::kHeads];
  // Of a consumer's warp: what four lanes have of the sums of a group, 16 bytes for each key.
  struct alignas(16) WarpSums {
    uint8_t of[ThisConfig::kThroughShared ? ThisConfig::kSumBuffers * ThisConfig::kGroupQueries * 512 : 16];
  };
  WarpSums sums[ThisConfig::kThroughShared ? ThisConfig::kConsumers * 4 : 1];
  Bounds bounds[ThisConfig::kQueryBuffers][ThisConfig::kQueries];
  Bounds all[ThisConfig::kQueryBuffers];  // keys that all of them see
  Run runs[ThisConfig::kQueryBuffers];

  WorkAssignment work;
  int64_t warp_lengths[ThisConfig::kThreads / 32];

  Mbarrier run_full[ThisConfig::kQueryBuffers];
  Mbarrier q_full[ThisConfig::kQueryBuffers], q_free[ThisConfig::kQueryBuffers];
  Mbarrier k_full[ThisConfig::kKeyStages], k_free[ThisConfig::kKeyStages];
};

// A lane sums heads 8j + 2c and 8j + 2c + 1, c its number among the four of a row: for two values of j it finds them in
// 16 bytes.
__device__ __forceinline__ int weight_place(int query, int head) {
  const int column = head % 8;
  if constexpr (ThisConfig::kHeads == 8) return query * 8 + column;
  return query * ThisConfig::kHeads + head / 16 * 16 + column / 2 * 4 + head / 8 % 2 * 2 + column % 2;
}

}  // namespace cupymla::indexer_logits
