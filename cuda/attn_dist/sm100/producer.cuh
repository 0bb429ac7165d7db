// The producers: one thread of each producer warp, which bring in Q and gather the selected KV rows. Each CTA of a pair
// fetches its heads of Q and its entries' rows; the bytes count at the leader's barriers.
#pragma once

#include "../../common/sm100/gather.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Producer {
  static constexpr int kGathers = Config::kWarpKeys / sm100::kGatherRows;

  Storage<Config>& storage;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const int rank;  // of this CTA in its pair
  const int warp = threadIdx.x / 32 % Config::kProducerWarps;
  HeadBlockRing<Config> head_blocks;
  Ring<Config::kStages> keys;
  uint32_t q_parity = 1;  // of q_free's awaited phase; the first is past

  __device__ __forceinline__ Producer(Storage<Config>& storage, const TensorMap& q_map, const TensorMap& kv_map,
                                      int rank)
      : storage(storage), q_map(q_map), kv_map(kv_map), rank(rank), head_blocks(storage) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const HeadBlock head_block = head_blocks.wait();
      head_blocks.release();
      head_blocks.advance();
      if (head_block.last()) break;
      if (!head_block.empty()) fetch(head_block);
    }
    if (warp == 0) drain();
  }

  __device__ __forceinline__ void fetch(const HeadBlock& head_block) {
    int4 next[kGathers];
    load_tokens(next, head_block, head_block.begin_block);
    for (int32_t block = head_block.begin_block; block < head_block.end_block; ++block) {
      int4 rows[kGathers];
#pragma unroll
      for (int i = 0; i < kGathers; ++i) rows[i] = head_block.entries.rows(next[i]);
      load_tokens(next, head_block, block + 1);
#pragma unroll 1
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        if (warp == 0 && block == head_block.begin_block) load_heads(head_block, tile);
        gather(rows, tile);
      }
    }
    q_parity ^= 1u;
  }

  // Of this warp's entries of a block.
  __device__ __forceinline__ void load_tokens(int4 (&tokens)[kGathers], const HeadBlock& head_block,
                                              int32_t block) const {
    const int32_t first = block * Config::kTileKeys + rank * Config::kCtaKeys + warp * Config::kWarpKeys;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) tokens[i] = head_block.entries.four_tokens(first + i * sm100::kGatherRows);
  }

  // Heads past the last one read as zero.
  __device__ __forceinline__ void load_heads(const HeadBlock& head_block, int tile) {
    Mbarrier& full = storage.q_full[tile];
    storage.q_free[tile].wait(q_parity);
    if (rank == 0) full.arrive_and_expect(Config::kCtas * Config::kHeadTileBytes);
    const int32_t head = head_block.first_head + rank * (padded_heads<Config>(head_block) / Config::kCtas);
    const int32_t column = tile * Config::kTileColumns;
    if constexpr (Config::kCtas == 2) {
      sm100::tma_load_4d_of_pair(storage.q[tile], q_map, full, column, head, head_block.query, head_block.batch);
    } else {
      tma_load_4d(storage.q[tile], q_map, full, column, head, head_block.query, head_block.batch);
    }
  }

  // The leader's first producer expects the bytes of all.
  __device__ __forceinline__ void gather(const int4 (&rows)[kGathers], int tile) {
    Mbarrier& full = storage.k_full[keys.stage];
    storage.k_free[keys.stage].wait(keys.free());
    if (rank == 0 && warp == 0) full.arrive_and_expect(Config::kCtas * Config::kKeyTileBytes);
    uint8_t* place = storage.k[keys.stage] + warp * Config::kWarpKeys * kSwizzleRowBytes;
    const int32_t column = tile * Config::kTileColumns;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) {
      uint8_t* destination = place + i * sm100::kGatherRows * kSwizzleRowBytes;
      if constexpr (Config::kCtas == 2) {
        sm100::gather_rows_of_pair(destination, kv_map, full, column, rows[i]);
      } else {
        sm100::gather_rows(destination, kv_map, full, column, rows[i]);
      }
    }
    keys.advance();
  }

  // Commits are still on their way here, from the leader: this CTA must not end before they have arrived.
  __device__ __forceinline__ void drain() {
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; ++stage) {
      storage.k_free[keys.stage].wait(keys.free());
      keys.advance();
    }
#pragma unroll 1
    for (int tile = 0; tile < Config::kTiles; ++tile) storage.q_free[tile].wait(q_parity);
  }
};

}  // namespace cupymla::attn_dist
