// What a CTA pair works on: a block of 128 heads of a few neighbouring queries.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

template <typename Config>
using Query = SparseQuery<Config::kBlockKeys>;

template <typename Config>
struct Work {
  const uint32_t rank = cluster_rank();
  const int32_t* const entries;  // `Storage::entries`
  const int32_t first_head;    // of this CTA
  const QueryRange range;

  __device__ __forceinline__ Work(const Parameters& params, const int32_t* entries)
      : entries(entries),
        first_head(static_cast<int32_t>(cluster_index() / params.head_block_clusters * Config::kClusterHeads +
                                        rank * Config::kHeads)),
        range(cluster_index() % params.head_block_clusters, params.groups, params.group_tokens) {}

  static __device__ __forceinline__ uint32_t cluster_index() { return blockIdx.x / Config::kCluster; }

  template <typename Take>
  __device__ __forceinline__ void for_each_query(const Parameters& params, Take take) const {
    for (uint32_t token = range.token; token < range.end; ++token) {
      take(Query<Config>(params, token, entries[token - range.token]));
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd_phase1
