// Stage `sink`: d_sink from what every query adds to it, in a fixed order. And what sinks are in the attention stages:
// the share that one leaves, the term of a query.
#pragma once

#include "../common/math.cuh"
#include "../common/sparse_query.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

// 1 / (1 + 2^x): what is left of a share when another one is 2^x times as large. Exact at +-infinity. The error of
// ex2.approx would show in d_sink, which is fp32.
__device__ __forceinline__ float left_share(float x) { return 1.f / (1.f + accurate_exp2(x)); }

// lse of a head, as it was given.
__device__ __forceinline__ float read_lse(const Parameters& params, const QueryPosition& query, int32_t head) {
  const int64_t batch = query.batch, token = query.query;
  return params.lse[batch * params.lse_batch + token * params.lse_query + head * params.lse_head];
}

// log2 of how many times the softmax sum a head's sink is. Both are given to the base of lse, so that what they have in
// common leaves without being rounded: d_sink is fp32, and would show it.
__device__ __forceinline__ float sink_excess(const Parameters& params, int32_t head, float lse) {
  return (params.attn_sink[head * params.attn_sink_head] * params.sink_to_lse - lse) * params.lse_to_log2;
}

// What a head's sink leaves of the softmax.
__device__ __forceinline__ float share_beside_sink(const Parameters& params, int32_t head, float lse) {
  return params.attn_sink == nullptr ? 1.f : left_share(sink_excess(params, head, lse));
}

// What a query adds to d_sink of a head; nothing where no entry was valid.
__device__ __forceinline__ void store_sink_term(const Parameters& params, const QueryPosition& query, int32_t head,
                                                bool occupied, float delta) {
  const float share = left_share(-sink_excess(params, head, read_lse(params, query, head)));
  const int64_t position = static_cast<int64_t>(query.batch) * params.s_q + query.query;
  params.sink_terms[position * static_cast<uint32_t>(params.h_q) + head] = occupied ? -share * delta : 0.f;
}

constexpr int kSinkHeads = 32;  // of a CTA
constexpr int kSinkThreads = 1024;

__device__ __forceinline__ void sum_sink_terms(const Parameters& params) {
  constexpr int kGroups = kSinkThreads / kSinkHeads;
  __shared__ float group_sums[kGroups][kSinkHeads];
  const int lane = threadIdx.x % kSinkHeads, group = threadIdx.x / kSinkHeads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) * kSinkHeads + lane;
  float sum = 0.f;
  if (head < params.h_q) {
#pragma unroll 4
    for (int64_t query = group; query < params.query_end; query += kGroups) {
      sum += params.sink_terms[query * params.h_q + head];
    }
  }
  group_sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || head >= params.h_q) return;
  float total = 0.f;
#pragma unroll
  for (int other = 0; other < kGroups; ++other) total += group_sums[other][lane];
  params.d_sink[head * params.d_sink_head] = total;
}

}  // namespace cupymla::sparse_mla_bwd
