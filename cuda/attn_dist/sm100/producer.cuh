// The producer warp: brings in Q, and gathers the selected KV rows. Each CTA of a pair fetches its heads of Q and its
// slots' rows; the bytes count at the leader's barriers.
#pragma once

#include "../../common/sm100/pair_copy.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Producer {
  static_assert(Config::kCtaSlots == 32 * sm100::kGatherRows, "a lane gathers four rows of a tile");

  Storage<Config>& storage;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const int rank;  // of this CTA in its pair
  const int lane = threadIdx.x % 32;
  PassRing<Config> passes;
  Ring<Config::kStages> keys;
  uint32_t q_parity = 1;  // of q_free's awaited phase; the first is past

  __device__ __forceinline__ Producer(Storage<Config>& storage, const TensorMap& q_map,
                                      const TensorMap& kv_map, int rank)
      : storage(storage), q_map(q_map), kv_map(kv_map), rank(rank), passes(storage) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const Pass pass = passes.wait();
      __syncwarp();
      if (lane == 0) passes.release();
      passes.advance();
      if (pass.last()) break;
      if (!pass.empty()) fetch(pass);
    }
    drain();
  }

  __device__ __forceinline__ void fetch(const Pass& pass) {
    int4 next = load_tokens(pass, pass.begin_block);
    for (int32_t block = pass.begin_block; block < pass.end_block; ++block) {
      const int4 rows = pass.slots.rows(next);
      next = load_tokens(pass, block + 1);
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        if (block == pass.begin_block) load_heads(pass, tile);
        gather(rows, tile);
      }
    }
    q_parity ^= 1u;
  }

  // The tokens of this lane's four slots of a block.
  __device__ __forceinline__ int4 load_tokens(const Pass& pass, int32_t block) const {
    return pass.slots.four_tokens(block * Config::kSlots + rank * Config::kCtaSlots + lane * sm100::kGatherRows);
  }

  // Heads past the last one read as zero.
  __device__ __forceinline__ void load_heads(const Pass& pass, int tile) {
    storage.q_free[tile].wait(q_parity);
    if (lane == 0) {
      Mbarrier& full = storage.q_full[tile];
      if (rank == 0) full.arrive_and_expect(Config::kCtas * Config::kHeadTileBytes);
      const int32_t head = pass.first_head + rank * (padded_heads<Config>(pass) / Config::kCtas);
      if constexpr (Config::kCtas == 2) {
        sm100::tma_load_4d_of_pair(storage.q[tile], q_map, full, tile * Config::kTileColumns, head, pass.query,
                                   pass.batch);
      } else {
        tma_load_4d(storage.q[tile], q_map, full, tile * Config::kTileColumns, head, pass.query, pass.batch);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void gather(int4 rows, int tile) {
    storage.k_free[keys.stage].wait(keys.free());
    Mbarrier& full = storage.k_full[keys.stage];
    if (rank == 0 && lane == 0) full.arrive_and_expect(Config::kCtas * Config::kKeyTileBytes);
    __syncwarp();
    uint8_t* place = storage.k[keys.stage] + lane * sm100::kGatherRows * kSwizzleRowBytes;
    if constexpr (Config::kCtas == 2) {
      sm100::gather_rows_of_pair(place, kv_map, full, tile * Config::kTileColumns, rows);
    } else {
      sm100::gather_rows(place, kv_map, full, tile * Config::kTileColumns, rows);
    }
    keys.advance();
  }

  // Commits of the other CTA's arrive here: this one must not end before they have.
  __device__ __forceinline__ void drain() {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      storage.k_free[keys.stage].wait(keys.free());
      keys.advance();
    }
    for (int tile = 0; tile < Config::kTiles; ++tile) storage.q_free[tile].wait(q_parity);
  }
};

}  // namespace cupymla::attn_dist
