// The producer warp: Q and the selected KV rows into shared memory, all by TMA.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/pair_copy.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config>
struct Producer {
  Storage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const TensorMap& kv_map;
  const Place<Config> place;
  const uint32_t lane = threadIdx.x % 32;
  Ring<Config::kStages> ring;
  uint32_t q_parity = 1;  // of q_free's awaited phase

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                      const TensorMap& kv_map)
      : storage(storage), params(params), q_map(q_map), kv_map(kv_map) {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place);
      if (work.blocks == 0) return;
      load_query(work);
      const sm100::QuerySlots slots(params, work);
      for (int32_t block = 0; block < work.blocks; ++block) {
        load_keys(slots, work.first_slot(block), work.groups(block));
        if (block > 0) load_values(slots, work.first_slot(block - 1), work.groups(block - 1));
      }
      load_values(slots, work.first_slot(work.blocks - 1), work.groups(work.blocks - 1));
    });
    drain();
  }

  __device__ __forceinline__ void load_query(const Work<Config>& work) {
    storage.q_free.wait(q_parity);
    q_parity ^= 1u;
    if (lane == 0) {
      if (place.rank == 0) storage.q_full.arrive_and_expect(Config::kCtas * sizeof(storage.q));
      for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
        sm100::tma_load_4d_of_pair(storage.q[tile], q_map, storage.q_full, tile * sm100::kTileColumns,
                                   work.first_head, work.query, work.batch);
      }
    }
    __syncwarp();
  }

  // The next stage, once it may be filled; `bytes` will come in each CTA.
  __device__ __forceinline__ uint8_t* next_stage(uint32_t bytes) {
    storage.free[ring.stage].wait(ring.free());
    if (place.rank == 0 && lane == 0) storage.full[ring.stage].arrive_and_expect(Config::kCtas * bytes);
    __syncwarp();
    return storage.stages[ring.stage];
  }

  // This CTA's half of a block's slots, all channels: lane l has the slots 4 l and on.
  __device__ __forceinline__ void load_keys(const sm100::QuerySlots& slots, int32_t first_slot, int groups) {
    const int32_t own = first_slot + static_cast<int32_t>(place.rank) * groups * sm100::kGroupSlots;
    const int4 rows = slots.rows(slots.four_tokens(own + static_cast<int32_t>(lane) * sm100::kGatherRows));
    const bool takes = static_cast<int>(lane) * sm100::kGatherRows < groups * sm100::kGroupSlots;
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      uint8_t* stage = next_stage(groups * sm100::kTileBytes);
      if (takes) {
        sm100::gather_rows_of_pair(stage + lane * sm100::kGatherRows * kSwizzleRowBytes, kv_map,
                                   storage.full[ring.stage], tile * sm100::kTileColumns, rows);
      }
      ring.advance();
    }
  }

  // All slots of a block, this CTA's half of the value channels.
  __device__ __forceinline__ void load_values(const sm100::QuerySlots& slots, int32_t first_slot, int groups) {
    constexpr int kGroups = Config::kSlots / sm100::kGroupSlots;
    const int32_t first = first_slot + sm100::group_slot(lane);
    int4 tokens[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      tokens[group] = slots.four_tokens(first + group * sm100::kGroupSlots);
    }
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      const int32_t tile = static_cast<int32_t>(place.rank) * Config::kPairTiles + chunk * Config::kStageTiles;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group < Config::kCtas * groups) {
          uint8_t* stage = next_stage(Config::kStageBytes);
          sm100::gather_group<Config::kStageTiles, true>(stage, kv_map, storage.full[ring.stage], tile,
                                                         slots.rows(tokens[group]), lane);
          ring.advance();
        }
      }
    }
  }

  // Waits until the Tensor Core has signalled everything to this CTA.
  __device__ __forceinline__ void drain() {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      storage.free[ring.stage].wait(ring.free());
      ring.advance();
    }
    storage.q_free.wait(q_parity);
  }
};

}  // namespace cupymla::sparse_mla_fwd
