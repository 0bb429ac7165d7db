// The producer warps: Q and the selected KV rows into shared memory, all by TMA. They fill the stages of the ring in turn,
// because the instructions for a stage's rows are issued one after another.
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
  const uint32_t own_turn = threadIdx.x / 32 - Config::kProducerWarp;
  uint32_t turn = 0;  // whose the next stage is
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
    if (own_turn != 0) return;
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

  // Goes on to the next stage; if it is this warp's, fills it with `bytes` in each CTA.
  template <typename Fill>
  __device__ __forceinline__ void fill_stage(uint32_t bytes, Fill fill) {
    if (turn == own_turn) {
      Mbarrier& full = storage.full[ring.stage];
      storage.free[ring.stage].wait(ring.free());
      if (place.rank == 0 && lane == 0) full.arrive_and_expect(Config::kCtas * bytes);
      __syncwarp();
      fill(storage.stages[ring.stage], full);
      __syncwarp();
    }
    turn = turn + 1 == Config::kProducerWarps ? 0 : turn + 1;
    ring.advance();
  }

  // This CTA's half of a block's slots, all channels: lane l has the slots 4 l and on.
  __device__ __forceinline__ void load_keys(const sm100::QuerySlots& slots, int32_t first_slot, int groups) {
    const int32_t own = first_slot + static_cast<int32_t>(place.rank) * groups * sm100::kGroupSlots;
    const int4 rows = slots.rows(slots.four_tokens(own + static_cast<int32_t>(lane) * sm100::kGatherRows));
    const bool takes = static_cast<int>(lane) * sm100::kGatherRows < groups * sm100::kGroupSlots;
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      fill_stage(groups * sm100::kTileBytes, [&](uint8_t* stage, Mbarrier& full) {
        if (!takes) return;
        sm100::gather_rows_of_pair(stage + lane * sm100::kGatherRows * kSwizzleRowBytes, kv_map, full,
                                   tile * sm100::kTileColumns, rows);
      });
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
          fill_stage(Config::kStageBytes, [&](uint8_t* stage, Mbarrier& full) {
            sm100::gather_group<Config::kStageTiles, true>(stage, kv_map, full, tile, slots.rows(tokens[group]), lane);
          });
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
    if (own_turn == 0) storage.q_free.wait(q_parity);
  }
};

}  // namespace cupymla::sparse_mla_fwd
