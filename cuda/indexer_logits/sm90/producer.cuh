// The warps that load: one query tiles with weights and visible keys, one key tiles.
#pragma once

#include "../../common/indexer_score.cuh"
#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "work.cuh"

namespace cupymla::indexer_logits {

__device__ __forceinline__ Bounds visible_keys(const Parameters& params, int32_t batch, int32_t query) {
  Bounds bounds{0, params.keys};
  if (params.starts != nullptr) {
    bounds.begin = max(0, params.starts[batch * params.starts_batch + query * params.starts_query]);
  }
  if (params.ends != nullptr) {
    bounds.end = min(bounds.end, params.ends[batch * params.ends_batch + query * params.ends_query]);
  }
  if (params.causal != 0) {
    // Floor of a quotient that may be negative; a key is seen when all its positions are.
    const int64_t position = params.q_start + query + 1;
    const int64_t limit = position <= 0 ? 0 : position / params.k_stride;
    if (limit < bounds.end) bounds.end = static_cast<int32_t>(limit);
  }
  if (bounds.begin >= bounds.end) bounds = {0, 0};
  return bounds;
}

__device__ __forceinline__ float read_weight(const Parameters& params, int32_t batch, int32_t query, int32_t head) {
  const int64_t place = batch * params.weights_batch + query * params.weights_query + head * params.weights_head;
  const float weight =
      params.bf16_weights != 0
          ? __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(params.weights)[place]) << 16)
          : reinterpret_cast<const float*>(params.weights)[place];
  if (params.q_scale == nullptr) return weight;
  const int64_t scale = batch * params.q_scale_batch + query * params.q_scale_query + head * params.q_scale_head;
  return indexer::head_weight(weight, params.q_scale[scale]);
}

__device__ __forceinline__ void load_queries(Storage& storage, const Parameters& params, const TensorMap& q_map) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<ThisConfig::kQueryBuffers> buffers;
  Walk walk(params);
  for (Run run; walk.next(run); buffers.advance()) {
    const uint32_t buffer = buffers.stage;
    storage.q_free[buffer].wait(buffers.free());
    const int32_t first = run.first_query();
    if (lane == 0) {
      storage.q_full[buffer].arrive_and_expect(sizeof(storage.q[buffer]));
      for (int tile = 0; tile < ThisConfig::kColumnTiles; ++tile) {
        tma_load_4d(storage.q[buffer][tile], q_map, storage.q_full[buffer],
                    tile * ThisConfig::kSpan / ThisConfig::kElementBytes, 0, first, run.batch);
      }
    }
    for (int i = lane; i < ThisConfig::kQueries * ThisConfig::kHeads; i += 32) {
      const int query = i / ThisConfig::kHeads, head = i % ThisConfig::kHeads;
      const bool there = first + query < params.queries && head < params.heads;
      storage.weights[buffer][weight_place(query, head)] =
          there ? read_weight(params, run.batch, first + query, head) : 0.0f;
    }
    Bounds any{params.keys, 0}, all{0, params.keys};
    for (int query = lane; query < ThisConfig::kQueries; query += 32) {
      const bool there = first + query < params.queries;
      const Bounds own = there ? visible_keys(params, run.batch, first + query) : Bounds{0, 0};
      storage.bounds[buffer][query] = own;
      if (own.begin < own.end) any = {min(any.begin, own.begin), max(any.end, own.end)};
      if (there) all = {max(all.begin, own.begin), min(all.end, own.end)};
    }
    any.begin = __reduce_min_sync(0xffffffffu, any.begin);
    any.end = __reduce_max_sync(0xffffffffu, any.end);
    all.begin = __reduce_max_sync(0xffffffffu, all.begin);
    all.end = __reduce_min_sync(0xffffffffu, all.end);
    if (lane == 0) {
      storage.any[buffer] = any;
      storage.all[buffer] = all;
    }
    storage.q_full[buffer].arrive();
  }
}

__device__ __forceinline__ void load_keys(Storage& storage, const Parameters& params, const TensorMap& k_map) {
  Ring<ThisConfig::kQueryBuffers> buffers;
  uint32_t uses = 0;  // eight bits for each consumer
  Walk walk(params);
  for (Run run; walk.next(run); buffers.advance()) {
    storage.q_full[buffers.stage].wait(buffers.full);
    const Visible visible(run, storage.any[buffers.stage]);
    storage.q_free[buffers.stage].arrive();
    uint32_t who = 0;
    for (int32_t tile = visible.first; tile < visible.end; ++tile) {
      const uint32_t use = uses >> who * 8 & 0xffu;
      const uint32_t stage = key_stage(use, who);
      storage.k_free[stage].wait(key_parity(use) ^ 1u);
      storage.k_full[stage].arrive_and_expect(sizeof(storage.k[0]));
      for (int column = 0; column < ThisConfig::kColumnTiles; ++column) {
        tma_load_4d(storage.k[stage][column], k_map, storage.k_full[stage],
                    column * ThisConfig::kSpan / ThisConfig::kElementBytes, tile * ThisConfig::kKeyRows, run.batch, 0);
      }
      uses = (uses & ~(0xffu << who * 8)) | (use + 1 & 0xffu) << who * 8;
      who = who + 1 == ThisConfig::kConsumers ? 0 : who + 1;
    }
  }
}

}  // namespace cupymla::indexer_logits
