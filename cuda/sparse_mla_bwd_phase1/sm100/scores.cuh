// The second warpgroup: scores from Tensor Memory to global memory, -inf where an entry is not valid.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/math.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm100/topk_gather.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sm100/tmem.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

// A warp has 32 heads and 64 entries of each block. A load gives it 16 heads as fragments: a quad of lanes has a row,
// each lane two neighbouring entries of every eight, so that a quad stores 32 bytes side by side.
template <typename Config>
struct ScoreWarp {
  static constexpr int kColumns = Config::kScoreColumns;
  static constexpr int kValues = 16 * kColumns / 32;  // of a lane, for 16 heads

  const Parameters& params;
  const int32_t first_head;  // of the warp
  const int32_t first_entry;  // of the warp, in a block
  const int lane = threadIdx.x % 32;
  const bool in_pairs;       // whether rows begin at multiples of 8 bytes

  __device__ __forceinline__ ScoreWarp(const Parameters& params, const Work<Config>& work)
      : params(params),
        first_head(work.first_head + (threadIdx.x / 32) % 2 * 32),
        first_entry((threadIdx.x / 32) % 4 / 2 * kColumns),
        in_pairs((reinterpret_cast<uint64_t>(params.p) % 8 |
                  (params.p_batch | params.p_query | params.p_head) % 2) == 0) {}

  // Which of this lane's entries are valid: bit c for column c less the lane's 2 * (lane % 4).
  __device__ __forceinline__ uint64_t valid_columns(const Query<Config>& query, int32_t entry) const {
    const sm100::QueryEntries entries(params, query);
    return sm100::valid_entries(entries, entries.token(entry + lane), entries.token(entry + 32 + lane)) >>
           (2 * (lane % 4));
  }

  // Stores 16 heads from `head` on, those of the query that there are; `entry` is the warp's first.
  __device__ __forceinline__ void store(const Query<Config>& query, int32_t head, int32_t entry, uint64_t valid,
                                        const uint32_t (&scores)[kValues]) const {
    const int32_t own_entry = entry + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t own_head = head + lane / 4 + 8 * r;
      if (own_head >= params.h_q) continue;
      float* row = params.p + query.batch * params.p_batch + query.query * params.p_query +
                   own_head * params.p_head + own_entry;
      const int32_t room = params.topk - own_entry;
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
    for (int32_t block_entry = 0; block_entry < params.topk; block_entry += Config::kBlockKeys) {
      const int32_t entry = block_entry + warp.first_entry;
      uint32_t scores[2][ScoreWarp<Config>::kValues] = {};
      uint64_t valid = 0;
      if (block_entry < query.entries) {
        valid = warp.valid_columns(query, entry);
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
      warp.store(query, warp.first_head, entry, valid, scores[0]);
      warp.store(query, warp.first_head + 16, entry, valid, scores[1]);
    }
  });
}

}  // namespace cupymla::sparse_mla_bwd_phase1
