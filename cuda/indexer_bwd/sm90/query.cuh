// A query, and which keys it names.
#pragma once

#include "../../common/block_reduction.cuh"
#include "../../common/indexer_score.cuh"
#include "params.cuh"

namespace cupymla::indexer_bwd {

constexpr int kThreads = 128;
constexpr int kTileKeys = 64;

struct Query {
  int32_t batch, query;
  int32_t entries;     // min(topk, topk_length), not negative
  int32_t tiles;
  uint32_t key_limit;  // key s is valid when (uint32_t)s < key_limit
  const int32_t* indices;
  const float* gradients;

  // That of a CTA, where each has one.
  __device__ __forceinline__ explicit Query(const Parameters& params)
      : Query(params, static_cast<int32_t>(blockIdx.x / static_cast<uint32_t>(params.queries)),
              static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(params.queries))) {}

  __device__ __forceinline__ Query(const Parameters& params, int32_t batch, int32_t query)
      : batch(batch),
        query(query),
        entries(params.topk),
        key_limit(static_cast<uint32_t>(params.keys)),
        indices(params.indices + batch * params.indices_batch + query * params.indices_query),
        gradients(params.grad_logits + batch * params.grad_logits_batch + query * params.grad_logits_query) {
    if (params.topk_length != nullptr) {
      const int32_t length = params.topk_length[batch * params.topk_length_batch + query * params.topk_length_query];
      entries = max(0, min(entries, length));
    }
    // Nobody writes lengths during the launch, so all threads read the same.
    tiles = (entries + kTileKeys - 1) / kTileKeys;
    if (params.causal != 0) {
      key_limit = static_cast<uint32_t>(
          indexer::causal_end(params.q_start, query, params.k_stride, params.keys));
    }
  }

  // The key of an entry, -1 where it is not valid.
  __device__ __forceinline__ int32_t key_of(int32_t entry) const {
    const int32_t named = entry < entries ? indices[entry] : -1;
    return static_cast<uint32_t>(named) < key_limit ? named : -1;
  }
};

// 0 for a head that only fills up.
__device__ __forceinline__ float weight_of(const Parameters& params, const Query& query, int head) {
  if (head >= params.heads) return 0.0f;
  const int64_t place =
      query.batch * params.weights_batch + query.query * params.weights_query + head * params.weights_head;
  return params.bf16_weights != 0
             ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(params.weights)[place])
             : reinterpret_cast<const float*>(params.weights)[place];
}

}  // namespace cupymla::indexer_bwd
