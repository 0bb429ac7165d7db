// Stage `sink`: d_sink from what every query adds to it, in a fixed order. And the share that a sink leaves.
#pragma once

#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

// 1 / (1 + 2^x): what is left of a share when another one is 2^x times as large. Exact at +-infinity.
__device__ __forceinline__ float left_share(float x) { return 1.f / (1.f + exp2f(x)); }

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
