// The second warpgroup: scores from Tensor Memory to global memory, -inf where a slot is not valid.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/math.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm100/slot_gather.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sm100/tmem.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

// A warp has 32 heads and 64 slots of each block. A load gives it 16 heads as fragments: a quad of lanes has a row,
// each lane two neighbouring slots of every eight, so that a quad stores 32 bytes side by side.
template <typename Config>
struct ScoreWarp {
  static constexpr int kColumns = Config::kScoreColumns;
  static constexpr int kValues = 16 * kColumns / 32;  // of a lane, for 16 heads

  const Parameters& params;
  const int32_t first_head;  // of the warp
  const int32_t first_slot;  // of the warp, in a block
  const int lane = threadIdx.x % 32;
  const bool in_pairs;       // whether rows begin at multiples of 8 bytes

  __device__ __forceinline__ ScoreWarp(const Parameters& params, const Work<Config>& work)
      : params(params),
        first_head(work.first_head + (threadIdx.x / 32) % 2 * 32),
        first_slot((threadIdx.x / 32) % 4 / 2 * kColumns),
        in_pairs((reinterpret_cast<uint64_t>(params.p) % 8 |
                  (params.p_batch | params.p_query | params.p_head) % 2) == 0) {}

  // Which of this lane's slots are valid: bit c for column c less the lane's 2 * (lane % 4).
  __device__ __forceinline__ uint64_t valid_columns(const Query<Config>& query, int32_t slot) const {
    const sm100::QuerySlots slots(params, query);
    return sm100::valid_slots(slots, slots.token(slot + lane), slots.token(slot + 32 + lane)) >> (2 * (lane % 4));
  }

  // Stores 16 heads from `head` on, those of the query that there are; `slot` is the warp's first.
  __device__ __forceinline__ void store(const Query<Config>& query, int32_t head, int32_t slot, uint64_t valid,
                                        const uint32_t (&scores)[kValues]) const {
    const int32_t own_slot = slot + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t own_head = head + lane / 4 + 8 * r;
      if (own_head >= params.h_q) continue;
      float* row = params.p + query.batch * params.p_batch + query.query * params.p_query +
                   own_head * params.p_head + own_slot;
      const int32_t room = params.topk - own_slot;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float x = valid >> (8 * j) & 1 ? __uint_as_float(scores[4 * j + 2 * r]) : negative_infinity();
        const float y = valid >> (8 * j) & 2 ? __uint_as_float(scores[4 * j + 2 * r + 1]) : negative_infinity();
        if (in_pairs && 8 * j + 1 < room) {
          __stcs(reinterpret_cast<float2*>(row + 8 * j), make_float2(x, y));
        } else {
          if (8 * j < room) __stcs(row + 8 * j, x);
          if (8 * j + 1 < room) __stcs(row + 8 * j + 1, y);
        }
      }
    }
  }
};

template <typename Config>
__device__ __forceinline__ void store_scores(Storage<Config>& storage, const Work<Config>& work,
                                             const Parameters& params) {
  const ScoreWarp<Config> warp(params, work);
  const uint32_t tmem = sm100::tmem_lane(storage.tmem, (threadIdx.x / 32) % 4 * 32);
  Ring<Config::kAccumulators> turn;
  work.for_each_query(params, [&](const Query<Config>& query) {
    for (int32_t block_slot = 0; block_slot < params.topk; block_slot += Config::kBlockSlots) {
      const int32_t slot = block_slot + warp.first_slot;
      uint32_t scores[2][ScoreWarp<Config>::kValues] = {};
      uint64_t valid = 0;
      if (block_slot < query.slots) {
        valid = warp.valid_columns(query, slot);
        storage.scores_full[turn.stage].wait(turn.full);
        sm100::fence_after_sync();
        const uint32_t columns = tmem + turn.stage * Config::kScoreColumns;
        sm100::tmem_load_fragments(scores[0], columns);
        sm100::tmem_load_fragments(scores[1], sm100::tmem_lane(columns, 16));
        sm100::wait_loads();
        sm100::fence_before_sync();
        __syncwarp();
        if (warp.lane == 0) {
          cluster_arrive_after_reads_at(cluster_address(smem_address(&storage.scores_free[turn.stage]), 0));
        }
        turn.advance();
      }
      warp.store(query, warp.first_head, slot, valid, scores[0]);
      warp.store(query, warp.first_head + 16, slot, valid, scores[1]);
    }
  });
}

}  // namespace cupymla::sparse_mla_bwd_phase1
