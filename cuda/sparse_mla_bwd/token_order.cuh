// Stages `sort` and `scatter`: each query takes its rows in the order of tokens, so that CTAs that began
// together are at about the same tokens at any time, whose rows of kv and of sums are then in L2. The attention between
// them is given lists in the place of indices, with their lengths, and leaves the distribution in their order.
#pragma once

#include "merge.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kScatterThreads = 256;

// The attention adds to its distribution, so zeros come first. A CTA to a query.
__device__ __forceinline__ void sort(MergeStorage<1>& storage, const Parameters& params) {
  wait_for_primary_grid(params.has_dependent != 0);
  if (params.query_begin + blockIdx.x >= params.query_end) return;
  if (params.listed_dist != nullptr) {
    float* const sums = params.listed_dist + static_cast<int64_t>(blockIdx.x) * params.topk;
    for (int32_t place = threadIdx.x; place < params.topk; place += kMergeThreads) sums[place] = 0.f;
  }
  Merge<1>(storage, params).run();
}

// From a query's list to its top-k entries, zeros to those that are not valid. Put together in shared memory, so that
// all of it leaves in a row. A CTA to a query.
__device__ __forceinline__ void scatter_distribution(const Parameters& params) {
  __shared__ float sums[kMaxEntries];
  const uint32_t token = params.query_begin + blockIdx.x;
  if (token >= params.query_end) return;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t entry = thread; entry < params.topk; entry += kScatterThreads) sums[entry] = 0.f;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * params.topk;
  const int32_t rows = rows_of(params.row_counts[blockIdx.x]);
#pragma unroll 4
  for (int32_t place = thread; place < rows; place += kScatterThreads) {
    sums[params.row_topk_entries[first + place]] = params.listed_dist[first + place];
  }
  __syncthreads();
  const QueryPosition query(params, token);
  float* const attn_dist =
      params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
#pragma unroll 4
  for (int32_t entry = thread; entry < params.topk; entry += kScatterThreads) attn_dist[entry] = sums[entry];
}

}  // namespace cupymla::sparse_mla_bwd
