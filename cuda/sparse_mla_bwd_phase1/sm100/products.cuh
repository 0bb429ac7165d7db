// The first warpgroup: brings in Q, gathers the rows of the entries, and multiplies.
#pragma once

#include "../../common/warp.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm100/gather.cuh"
#include "../../common/sm100/topk_gather.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

// Warp 3: Q of each query, 64 heads into either CTA.
template <typename Config>
__device__ __forceinline__ void load_queries(Storage<Config>& storage, const Work<Config>& work,
                                             const Parameters& params, const TensorMap& q_map) {
  if (threadIdx.x % 32 != 0) return;
  Ring<1> turn;
  work.for_each_query(params, [&](const Query<Config>& query) {
    if (query.blocks == 0) return;
    storage.q_free.wait(turn.free());
    if (work.rank == 0) storage.q_full.arrive_and_expect(Config::kCluster * sizeof(storage.q));
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      sm100::tma_load_4d_of_pair(storage.q[tile], q_map, storage.q_full, tile * Config::kTileColumns, work.first_head,
                                 query.query, query.batch);
    }
    turn.advance();
  });
  storage.q_free.wait(turn.free());
}

// Warps 0 and 1: the CTA's 64 rows of each block, the left column tiles by one, the others by the other.
template <typename Config, int kFirstTile, int kEndTile>
__device__ __forceinline__ void gather_keys(Storage<Config>& storage, const Work<Config>& work,
                                            const Parameters& params, const TensorMap& kv_map) {
  const uint32_t lane = threadIdx.x % 32;
  const bool expects = work.rank == 0 && kFirstTile == 0 && lane == 0;
  Ring<Config::kStages> turn;
  work.for_each_query(params, [&](const Query<Config>& query) {
    const sm100::QueryEntries entries(params, query);
    int32_t entry = static_cast<int32_t>(work.rank) * Config::kCtaKeys + sm100::group_entry(lane);
    int4 tokens = entries.four_tokens(entry);
    for (int32_t block = 0; block < query.blocks; ++block) {
      const int4 rows = entries.rows(tokens);
      entry += Config::kBlockKeys;
      tokens = entries.four_tokens(entry);
      auto& stage = storage.k[turn.stage];
      storage.k_free[turn.stage].wait(turn.free());
      if (expects) storage.k_full[turn.stage].arrive_and_expect(Config::kCluster * sizeof(stage));
      sm100::gather_group<kEndTile - kFirstTile, true>(stage[kFirstTile], kv_map, storage.k_full[turn.stage],
                                                       kFirstTile, rows, lane);
      __syncwarp();
      turn.advance();
    }
  });
  // The other CTA signals here: it must have done so for the last time before this one ends.
  for (int i = 0; i < Config::kStages; ++i, turn.advance()) storage.k_free[turn.stage].wait(turn.free());
}

// Warp 2 of the even CTA: the products of both.
template <typename Config, bool kFp16>
__device__ __forceinline__ void multiply(Storage<Config>& storage, const Work<Config>& work, const Parameters& params) {
  // The election comes first: behind a condition on the rank, the compiler does not tell that one thread is left.
  if (!elect_one() || work.rank != 0) return;
  constexpr uint32_t kInstruction = sm100::instruction_f16(Config::kClusterHeads, Config::kBlockKeys, kFp16);
  constexpr int kSteps = Config::kTileColumns / 16;
  const uint64_t q = sm100::descriptor_128b(smem_address(storage.q[0]));
  Ring<1> queries;
  Ring<Config::kStages> keys;
  Ring<Config::kAccumulators> scores;
  work.for_each_query(params, [&](const Query<Config>& query) {
    if (query.blocks == 0) return;
    storage.q_full.wait(queries.full);
    for (int32_t block = 0; block < query.blocks; ++block) {
      storage.scores_free[scores.stage].wait(scores.free());
      storage.k_full[keys.stage].wait(keys.full);
      sm100::fence_after_sync();
      const uint64_t k = sm100::descriptor_128b(smem_address(storage.k[keys.stage][0]));
      const uint32_t d = storage.tmem + scores.stage * Config::kScoreColumns;
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint32_t offset = (tile * Config::kTileBytes + step * 32) / 16;
          sm100::mma_f16<2>(d, q + offset, k + offset, kInstruction, tile + step != 0);
        }
      }
      sm100::commit_to_pair(storage.k_free[keys.stage]);
      sm100::commit_to_pair(storage.scores_full[scores.stage]);
      keys.advance();
      scores.advance();
    }
    sm100::commit_to_pair(storage.q_free);
    queries.advance();
  });
}

}  // namespace cupymla::sparse_mla_bwd_phase1
