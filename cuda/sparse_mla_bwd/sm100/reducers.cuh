// The reducer warpgroup: brings dKV out of Tensor Memory, part by part, and reduces or stores it. Nobody else waits for
// that: a place in Tensor Memory is free once its part is in registers.
#pragma once

#include "../../common/sm100/tcgen05.cuh"
#include "row_targets.cuh"
#include "pipeline_state.cuh"

namespace cupymla::sparse_mla_bwd {

// A lane of Tensor Memory is a channel here.
template <typename Storage>
struct Reducer {
  using Config = typename Storage::Config;
  static constexpr int kHeld = Config::kHeld, kFirst = Config::kPartKeys - kHeld;   // together the entries of a part

  Storage& storage;
  const Parameters& params;
  const int rank = static_cast<int>(cluster_rank());
  const int warp = (threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
  const uint32_t tmem = sm100::tmem_lane(storage.tmem, warp * 32);
  const int parts = Config::kValueParts + (Config::kHasRope && rank == 0 ? Config::kRopeParts : 0);
  const int places = min(parts, Config::kPlaces);  // that they go through, one after the other
  int place = 0;
  uint32_t parity = 0;  // of the place's next part
  PipelineState<Config::kSets> state;

  // The last entries of a part may go out when the next part has been taken: so the place of the next one is free
  // sooner.
  __device__ __forceinline__ void run(const SparseQuery<Config::kTileKeys>& query, int32_t head_block) {
    for (int32_t block = 0; block < query.blocks; ++block) {
      const RowTargets<Config> targets(params, query, block * Config::kTileKeys, head_block);
      uint32_t held[kHeld + 1];  // there are no arrays of nothing
      storage.entries_full[state.set()].wait(state.set_parity());
      for (int part = 0; part < parts; ++part) {
        uint32_t values[Config::kPartKeys];
        take(values);
        if (kHeld > 0 && part > 0) send<kHeld>(targets, part - 1, kFirst, held);
        send<kFirst>(targets, part, 0, values);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held[i] = values[kFirst + i];
      }
      if (kHeld > 0) send<kHeld>(targets, parts - 1, kFirst, held);
      state.advance();
    }
  }

  // The next part, from its place.
  __device__ __forceinline__ void take(uint32_t (&values)[Config::kPartKeys]) {
    const uint32_t address = tmem + Config::kKeyGradient + place * Config::kPartKeys;
    storage.part_full[place].wait(parity);
    sm100::fence_after_sync();
    sm100::tmem_load(values, address);
    sm100::wait_loads();
    sm100::fence_before_sync();
    __syncwarp();
    if (lane == 0) storage.part_free[place].arrive();
    if (++place == places) {
      place = 0;
      parity ^= 1u;
    }
  }

  // What a part has for its entries from `entry` on.
  template <int kTileKeys>
  __device__ __forceinline__ void send(const RowTargets<Config>& targets, int part, int entry,
                                       const uint32_t* values) const {
    int32_t channel = (rank * 2 + part / Config::kHalves) * 2 * Config::kTileColumns + warp * 32 + lane;
    if (Config::kHasRope && part >= Config::kValueParts) {
      // An accumulator of 64 rows has 16 of them in each quarter of the lanes.
      if (lane >= 16) return;
      channel = Config::kDV + warp * 16 + lane;
    }
    const int first = part % Config::kHalves * Config::kPartKeys + entry;
    targets.template write<kTileKeys>(first, storage.tokens[state.set()] + first, channel, values);
  }
};

}  // namespace cupymla::sparse_mla_bwd
