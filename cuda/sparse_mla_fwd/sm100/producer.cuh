// What brings Q and the selected KV rows into shared memory, all by TMA: two warps take turns at the stages of the ring,
// a third brings the rest of Q and fills stages a second time with values. Several, because the instructions for a
// stage's rows are issued one after another.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/pair_copy.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_fwd {

// Rows of this lane's four slots of one half of a block.
__device__ __forceinline__ int4 half_block_rows(const sm100::QuerySlots& slots, int32_t first_slot, uint32_t half,
                                                uint32_t lane) {
  return slots.rows(
      slots.four_tokens(first_slot + static_cast<int32_t>(half) * sm100::kGroupSlots + sm100::group_slot(lane)));
}

template <typename Config>
struct KeyWarp {
  Storage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const Place<Config> place;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t own_turn = threadIdx.x / 32 - Config::kKeyWarp;
  uint32_t turn = 0;  // whose the next stage is
  Ring<Config::kStages> ring;
  Ring<2> ropes;
  uint32_t kept_parity = 1;  // of q_kept's awaited phase

  __device__ __forceinline__ KeyWarp(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                     const TensorMap& kv_map)
      : storage(storage), params(params), q_map(q_map), kv_map(kv_map) {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place);
      if (work.blocks == 0) return;
      stage_query(work);
      const sm100::QuerySlots slots(params, work);
      for (int32_t block = 0; block < work.blocks; ++block) {
        load_keys(half_block_rows(slots, work.first_slot(block), place.rank, lane));
      }
    });
    // Until the Tensor Core has signalled everything to this CTA.
    for (int stage = 0; stage < Config::kStages; ++stage) {
      storage.free[ring.stage].wait(ring.free());
      ring.advance();
    }
    if constexpr (Config::kHasRope) {
      for (int stage = 0; stage < Config::kRopes; ++stage) {
        storage.rope_free[ropes.stage].wait(ropes.free());
        ropes.advance();
      }
    }
    if (own_turn == 0) storage.q_kept.wait(kept_parity);
  }

  // Whether this warp fills what comes next.
  __device__ __forceinline__ bool takes_turn() {
    const bool own = turn == own_turn;
    turn = turn + 1 == Config::kKeyWarps ? 0 : turn + 1;
    return own;
  }

  // Q's tiles for Tensor Memory, into stages of the ring.
  __device__ __forceinline__ void stage_query(const Work<Config>& work) {
    if (own_turn == 0) storage.q_kept.wait(kept_parity);
    kept_parity ^= 1u;
    for (int part = 0; part < Config::kQueryStages; ++part) {
      if (own_turn == 0) {
        storage.free[ring.stage].wait(ring.free());
        __syncwarp();
        if (lane == 0) {
          if (part == 0) storage.q_staged.arrive_and_expect(Config::kQueryStages * Config::kStageBytes);
          for (int tile = 0; tile < Config::kStageTiles; ++tile) {
            tma_load_4d(storage.stages[ring.stage] + tile * sm100::kTileBytes, q_map, storage.q_staged,
                        (part * Config::kStageTiles + tile) * sm100::kTileColumns, work.first_head, work.query,
                        work.batch);
          }
        }
        __syncwarp();
      }
      ring.advance();
    }
  }

  __device__ __forceinline__ void expect(Mbarrier& full, uint32_t bytes) {
    __syncwarp();
    if (place.rank == 0 && lane == 0) full.arrive_and_expect(Config::kCtas * bytes);
    __syncwarp();
  }

  // All channels of this CTA's half of a block.
  __device__ __forceinline__ void load_keys(int4 rows) {
    for (int part = 0; part < Config::kBlockStages; ++part) {
      if (takes_turn()) {
        Mbarrier& full = storage.keys[ring.stage];
        storage.free[ring.stage].wait(ring.free());
        expect(full, Config::kStageBytes);
        sm100::gather_group<Config::kStageTiles, true>(storage.stages[ring.stage], kv_map, full,
                                                       part * Config::kStageTiles, rows, lane);
      }
      ring.advance();
    }
    if constexpr (Config::kHasRope) {
      if (takes_turn()) {
        Mbarrier& full = storage.rope_full[ropes.stage];
        storage.rope_free[ropes.stage].wait(ropes.free());
        expect(full, sm100::kTileBytes);
        sm100::gather_group<1, true>(storage.ropes[ropes.stage], kv_map, full, Config::kValueTiles, rows, lane);
      }
      ropes.advance();
    }
  }
};

// Brings Q's tiles that stay in shared memory, and fills stages whose keys have been multiplied with this CTA's half of
// the channels of the other CTA's slots.
template <typename Config>
struct ValueWarp {
  Storage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const Place<Config> place;
  const uint32_t lane = threadIdx.x % 32;
  Ring<Config::kStages> ring;
  Phases read;
  uint32_t q_parity = 1;  // of q_free's awaited phase

  __device__ __forceinline__ ValueWarp(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                       const TensorMap& kv_map)
      : storage(storage), params(params), q_map(q_map), kv_map(kv_map) {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place);
      if (work.blocks == 0) return;
      load_query(work);
      for (int part = 0; part < Config::kQueryStages; ++part) ring.advance();
      const sm100::QuerySlots slots(params, work);
      for (int32_t block = 0; block < work.blocks; ++block) {
        load_values(half_block_rows(slots, work.first_slot(block), place.rank ^ 1u, lane));
      }
    });
    storage.q_free.wait(q_parity);
  }

  __device__ __forceinline__ void load_query(const Work<Config>& work) {
    storage.q_free.wait(q_parity);
    q_parity ^= 1u;
    __syncwarp();
    if (lane == 0) {
      if (place.rank == 0) storage.q_full.arrive_and_expect(Config::kCtas * sizeof(storage.q));
      for (int tile = 0; tile < Config::kSharedTiles; ++tile) {
        sm100::tma_load_4d_of_pair(storage.q[tile], q_map, storage.q_full,
                                   (Config::kTmemTiles + tile) * sm100::kTileColumns, work.first_head, work.query,
                                   work.batch);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_values(int4 rows) {
    for (int part = 0; part < Config::kBlockStages; ++part) {
      Mbarrier& keys_read = storage.keys_read[ring.stage];
      Mbarrier& full = storage.values[ring.stage];
      const uint32_t owner = part / Config::kChunks;  // the CTA whose keys are its values
      // CTA 0 waits in either case, so that it arrives in the right phase. CTA 1 must not wait where it has nothing to
      // fill: nothing holds the phases back for it.
      if (place.rank == 0 || owner == 0) keys_read.wait(read.full(ring.stage));
      read.advance(ring.stage);
      __syncwarp();
      if (place.rank == 0 && lane == 0) full.arrive_and_expect(Config::kStageBytes);
      __syncwarp();
      if (place.rank != owner) {
        const int tile = static_cast<int>(place.rank) * Config::kValueTiles / Config::kCtas +
                         part % Config::kChunks * Config::kStageTiles;
        sm100::gather_group<Config::kStageTiles, true>(storage.stages[ring.stage], kv_map, full, tile, rows, lane);
      }
      ring.advance();
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
