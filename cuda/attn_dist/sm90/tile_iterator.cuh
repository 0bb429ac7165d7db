// The head blocks a CTA makes: over each of its queries one for every kHeads heads, each over the same blocks of
// entries.
#pragma once

#include "../../common/sparse_query.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct TileIterator {
  QueryRange queries;  // `token` is the present one
  SparseQuery<Config::kTileKeys> query;
  int32_t first_head = 0;
  uint32_t head_blocks = 0;  // so far that were not empty
  int32_t slice_begin, slice_end;  // blocks of a row that are this CTA's
  int32_t end_block;               // the present query's can have valid entries from slice_begin up to here
  const int32_t* indices;          // of the present query
  const uint8_t* kv;               // of its batch entry

  __device__ __forceinline__ explicit TileIterator(const Parameters& params)
      : queries(blockIdx.x / params.slices, params.groups, params.group_tokens), query(params, queries.token) {
    const int32_t row_blocks = (params.topk + Config::kTileKeys - 1) / Config::kTileKeys;
    slice_begin = static_cast<int32_t>(blockIdx.x % params.slices) * params.slice_blocks;
    slice_end = min(slice_begin + params.slice_blocks, row_blocks);
    begin_query(params);
  }

  __device__ __forceinline__ bool done() const { return queries.token == queries.end; }
  __device__ __forceinline__ bool empty() const { return slice_begin == end_block; }

  __device__ __forceinline__ void advance(const Parameters& params) {
    head_blocks += empty() ? 0 : 1;
    first_head += Config::kHeads;
    if (first_head < params.h_q && !empty()) return;
    first_head = 0;
    if (++queries.token == queries.end) return;
    query = SparseQuery<Config::kTileKeys>(params, queries.token);
    begin_query(params);
  }

  __device__ __forceinline__ void begin_query(const Parameters& params) {
    end_block = max(slice_begin, min(query.blocks, slice_end));
    indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
    kv = params.kv + query.batch * params.kv_batch_bytes;
  }

  __device__ __forceinline__ const float* lse(const Parameters& params) const {
    return params.lse + query.batch * params.lse_batch + query.query * params.lse_query;
  }
  __device__ __forceinline__ float* dist(const Parameters& params) const {
    return params.dist + query.batch * params.dist_batch + query.query * params.dist_query;
  }
};

}  // namespace cupymla::attn_dist
