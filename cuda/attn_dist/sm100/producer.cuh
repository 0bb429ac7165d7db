// The producers: one thread of each producer warp, which bring in Q and gather the selected KV rows. Each CTA of a pair
// fetches its heads of Q and its slots' rows; the bytes count at the leader's barriers.
#pragma once

#include "../../common/sm100/gather.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Producer {
  static constexpr int kGathers = Config::kWarpSlots / sm100::kGatherRows;

  Storage<Config>& storage;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const int rank;  // of this CTA in its pair
  const int warp = threadIdx.x / 32 % Config::kProducerWarps;
  PassRing<Config> passes;
  Ring<Config::kStages> keys;
  uint32_t q_parity = 1;  // of q_free's awaited phase; the first is past

  __device__ __forceinline__ Producer(Storage<Config>& storage, const TensorMap& q_map, const TensorMap& kv_map,
                                      int rank)
      : storage(storage), q_map(q_map), kv_map(kv_map), rank(rank), passes(storage) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const Pass pass = passes.wait();
      passes.release();
      passes.advance();
      if (pass.last()) break;
      if (!pass.empty()) fetch(pass);
    }
    if (warp == 0) drain();
  }

  __device__ __forceinline__ void fetch(const Pass& pass) {
    int4 next[kGathers];
    load_tokens(next, pass, pass.begin_block);
    for (int32_t block = pass.begin_block; block < pass.end_block; ++block) {
      int4 rows[kGathers];
#pragma unroll
      for (int i = 0; i < kGathers; ++i) rows[i] = pass.slots.rows(next[i]);
      load_tokens(next, pass, block + 1);
#pragma unroll 1
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        if (warp == 0 && block == pass.begin_block) load_heads(pass, tile);
        gather(rows, tile);
      }
    }
    q_parity ^= 1u;
  }

  // Of this warp's slots of a block.
  __device__ __forceinline__ void load_tokens(int4 (&tokens)[kGathers], const Pass& pass, int32_t block) const {
    const int32_t first = block * Config::kSlots + rank * Config::kCtaSlots + warp * Config::kWarpSlots;
#pragma unroll
    for (int i = 0; i < kGathers; ++i) tokens[i] = pass.slots.four_tokens(first + i * sm100::kGatherRows);
  }

  // Heads past the last one read as zero.
  __device__ __forceinline__ void load_heads(const Pass& pass, int tile) {
    Mbarrier& full = storage.q_full[tile];
    storage.q_free[tile].wait(q_parity);
    if (rank == 0) full.arrive_and_expect(Config::kCtas * Config::kHeadTileBytes);
    const int32_t head = pass.first_head + rank * (padded_heads<Config>(pass) / Config::kCtas);
    const int32_t column = tile * Config::kTileColumns;
    if constexpr (Config::kCtas == 2) {
      sm100::tma_load_4d_of_pair(storage.q[tile], q_map, full, column, head, pass.query, pass.batch);
    } else {
      tma_load_4d(storage.q[tile], q_map, full, column, head, pass.query, pass.batch);
    }
  }

  // The leader's first producer expects the bytes of all.
  __device__ __forceinline__ void gather(const int4 (&rows)[kGathers], int tile) {
    Mbarrier& full = storage.k_full[keys.stage];
    storage.k_free[keys.stage].wait(keys.free());
    if (rank == 0 && warp == 0) full.arrive_and_expect(Config::kCtas * Config::kKeyTileBytes);
    uint8_t* place = storage.k[keys.stage] + warp * Config::kWarpSlots * kSwizzleRowBytes;
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
