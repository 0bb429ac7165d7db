// The warps that load: one query tiles with weights and visible keys, one key tiles.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "work.cuh"

namespace cupymla::indexer_logits {

// Puts the weights of a query tile in their places. Several loads are under way at a time: a first query tile would
// otherwise be waited for as long as a query tile takes.
template <bool kBf16>
__device__ __forceinline__ void load_weights(float* to, const Parameters& params, const Run& run, int lane) {
  constexpr int kHeads = ThisConfig::kHeads;
  constexpr int kAll = ThisConfig::kQueries * kHeads;
  constexpr int kAtATime = ThisConfig::kWeightLoads;
  static_assert(kAll % (32 * kAtATime) == 0);
  // A lane's own part of query and head; what is added is the same in all lanes, and so is its address.
  const int own_query = lane / kHeads, own_head = lane % kHeads;
  const uint8_t* weights = params.weights;
  const int64_t own_weight = own_query * params.weights_query + own_head * params.weights_head;
  const float* scales = params.q_scale + (own_query * params.q_scale_query + own_head * params.q_scale_head);
  weights += own_weight * (kBf16 ? 2 : 4);
  const int32_t queries = params.queries - run.first_query() - own_query, heads = params.heads - own_head;
  // What does not come at the first time is brought into L2 meanwhile, 32 weights a lane.
#pragma unroll 1
  for (int first = 32 * (kAtATime + lane); first < kAll; first += 32 * 32) {
    const int query = first / kHeads, head = first % kHeads;
    if (query >= params.queries - run.first_query() || head >= params.heads) continue;
    const int64_t at = run.batch * params.weights_batch + (run.first_query() + query) * params.weights_query +
                       head * params.weights_head;
    const int64_t scale_at = run.batch * params.q_scale_batch + (run.first_query() + query) * params.q_scale_query +
                             head * params.q_scale_head;
    prefetch_l2(params.weights + at * (kBf16 ? 2 : 4));
    if (params.q_scale != nullptr) prefetch_l2(params.q_scale + scale_at);
  }
#pragma unroll 1
  for (int first = 0; first < kAll; first += 32 * kAtATime) {
    float weight[kAtATime], scale[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int query = (first + i * 32) / kHeads, head = (first + i * 32) % kHeads;
      const int64_t at = run.batch * params.weights_batch + (run.first_query() + query) * params.weights_query +
                         head * params.weights_head;
      const int64_t scale_at = run.batch * params.q_scale_batch + (run.first_query() + query) * params.q_scale_query +
                               head * params.q_scale_head;
      const bool there = query < queries && head < heads;
      weight[i] = scale[i] = 0.0f;
      if (there && kBf16) {
        weight[i] = __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(weights)[at]) << 16);
      }
      if (there && !kBf16) weight[i] = reinterpret_cast<const float*>(weights)[at];
      if (there && params.q_scale != nullptr) scale[i] = scales[scale_at];
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      const int place = first + i * 32 + lane;
      to[weight_place(place / kHeads, place % kHeads)] =
          params.q_scale == nullptr ? weight[i] : indexer::head_weight(weight[i], scale[i]);
    }
  }
}

__device__ __forceinline__ void load_queries(Storage& storage, const Parameters& params, const TensorMap& q_map) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<ThisConfig::kQueryBuffers> buffers;
  int32_t turn = 0;
  for (WorkAssignment work = storage.work; work.length > 0; work.advance(params.query_tiles), buffers.advance()) {
    const uint32_t buffer = buffers.stage;
    storage.q_free[buffer].wait(buffers.free());
    const int32_t first = work.query_tile * ThisConfig::kQueries;
    Bounds any{params.keys, 0}, all{0, params.keys};
    for (int query = lane; query < ThisConfig::kQueries; query += 32) {
      const bool there = first + query < params.queries;
      const Bounds own = there ? visible_keys(params, work.batch, first + query) : Bounds{0, 0};
      storage.bounds[buffer][query] = own;
      if (own.begin < own.end) any = {min(any.begin, own.begin), max(any.end, own.end)};
      if (there) all = {max(all.begin, own.begin), min(all.end, own.end)};
    }
    any.begin = __reduce_min_sync(0xffffffffu, any.begin);
    any.end = __reduce_max_sync(0xffffffffu, any.end);
    all.begin = __reduce_max_sync(0xffffffffu, all.begin);
    all.end = __reduce_min_sync(0xffffffffu, all.end);

    const Extent extent(any, params);
    const int64_t end = min(work.at + work.length, extent.length());
    const Run run{work.batch,
                  work.query_tile,
                  extent.first + extent.scored_before(work.at),
                  extent.first + extent.scored_before(end),
                  turn,
                  extent.filled_before(work.at),
                  extent.filled_before(end),
                  extent.first,
                  extent.scored()};
    work.length -= end - work.at;
    work.at = 0;
    turn = (turn + run.end - run.first) % ThisConfig::kConsumers;

    const bool is_scored = run.first < run.end;
    if (lane == 0) {
      storage.all[buffer] = all;
      storage.runs[buffer] = run;
      storage.run_full[buffer].arrive();
      storage.q_full[buffer].arrive_and_expect(is_scored ? sizeof(storage.q[buffer]) : 0);
      if (is_scored) {
        for (int tile = 0; tile < ThisConfig::kColumnTiles; ++tile) {
          tma_load_4d(storage.q[buffer][tile], q_map, storage.q_full[buffer],
                      tile * ThisConfig::kSpan / ThisConfig::kElementBytes, 0, first, run.batch);
        }
      }
    }
    if (is_scored && params.bf16_weights != 0) load_weights<true>(storage.weights[buffer], params, run, lane);
    if (is_scored && params.bf16_weights == 0) load_weights<false>(storage.weights[buffer], params, run, lane);
    storage.q_full[buffer].arrive();
  }
  storage.q_free[buffers.stage].wait(buffers.free());
  if (lane == 0) {
    storage.runs[buffers.stage] = Run{-1};
    storage.run_full[buffers.stage].arrive();
    storage.q_full[buffers.stage].arrive_and_expect(0);
  }
  storage.q_full[buffers.stage].arrive();
}

__device__ __forceinline__ void load_keys(Storage& storage, const Parameters& params, const TensorMap& k_map) {
  Ring<ThisConfig::kQueryBuffers> buffers;
  uint32_t uses = 0;  // eight bits for each consumer
  for (;; buffers.advance()) {
    // Not for the heads and weights of the run: the first keys come together with them.
    storage.run_full[buffers.stage].wait(buffers.full);
    const Run run = storage.runs[buffers.stage];
    if (run.batch < 0) break;
    storage.q_free[buffers.stage].arrive();
    uint32_t warpgroup_idx = run.turn;
    for (int32_t tile = run.first; tile < run.end; ++tile) {
      const uint32_t use = uses >> warpgroup_idx * 8 & 0xffu;
      const uint32_t stage = key_stage(use, warpgroup_idx);
      storage.k_free[stage].wait(key_parity(use) ^ 1u);
      storage.k_full[stage].arrive_and_expect(sizeof(storage.k[0]));
      for (int column = 0; column < ThisConfig::kColumnTiles; ++column) {
        tma_load_4d(storage.k[stage][column], k_map, storage.k_full[stage],
                    column * ThisConfig::kSpan / ThisConfig::kElementBytes, tile * ThisConfig::kKeyRows, run.batch, 0);
      }
      uses = (uses & ~(0xffu << warpgroup_idx * 8)) | (use + 1 & 0xffu) << warpgroup_idx * 8;
      warpgroup_idx = warpgroup_idx + 1 == ThisConfig::kConsumers ? 0 : warpgroup_idx + 1;
    }
  }
}

}  // namespace cupymla::indexer_logits
