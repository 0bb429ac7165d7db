// Stage `list`: for each token, which entries of the queries name it (common/entry_lists.cuh). `sum_rows` puts each
// list in order.
#pragma once

#include "../common/entry_lists.cuh"
#include "../common/grid_dependency.cuh"
#include "../common/sparse_query.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

using cupymla::kListCtas;
using cupymla::kListThreads;
using cupymla::kMostRangeRows;
using cupymla::ListStorage;

// Python mirrors it as `ListParameters` in cupymla/ops/sparse_mla_bwd/cuda.py. A chunk's lists are those of blockIdx.y.
struct ListParameters {
  Parameters common;
  uint32_t chunk_queries;  // of each chunk but the last, which may have fewer
};

// Rows are those of all batch entries.
struct ListChunk {
  const Parameters& params;
  const uint32_t first_query, queries;

  __device__ __forceinline__ explicit ListChunk(const ListParameters& given)
      : params(given.common),
        first_query(params.query_begin + blockIdx.y * given.chunk_queries),
        queries(min(given.chunk_queries, params.query_end - first_query)) {}

  // Below 2^31, see plan.py.
  __device__ __forceinline__ uint32_t kv_rows() const { return static_cast<uint32_t>(params.kv_rows); }

  __device__ __forceinline__ SparseQuery<64> query(uint32_t number) const { return {params, number}; }

  __device__ __forceinline__ int32_t first_row(const QueryPosition& query) const { return query.batch * params.s_kv; }

  __device__ __forceinline__ int32_t* row_ends() const {
    return params.row_ends + static_cast<int64_t>(blockIdx.y) * params.kv_rows;
  }

  __device__ __forceinline__ int32_t* entry_list() const {
    const int64_t before = static_cast<int64_t>(first_query - params.query_begin) * params.topk;
    return params.entry_list + before;
  }

  __device__ __forceinline__ void wait() const { wait_for_primary_grid(params.has_dependent != 0); }
};

}  // namespace cupymla::sparse_mla_bwd
