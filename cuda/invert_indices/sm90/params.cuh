// Parameter record of both kernels. Python mirrors it as `Parameters` in cupymla/ops/invert_indices/cuda.py; the sizes
// are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::invert_indices {

struct Parameters {
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  int32_t* offsets;            // [batch, s_kv + 1]
  int32_t* entries;            // [batch, s_q * topk]
  // Workspace [batch, s_q * topk]: by chunk of queries and token, in chance order, the chunk's entries, counted from
  // its first one; null without any.
  int32_t* scattered;
  // [batch, chunks, s_kv]: where each token's part of the chunk's entries ends. Workspace; of one chunk, offsets + 1.
  int32_t* row_ends;

  // Strides in elements.
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t offsets_batch, entries_batch, row_ends_batch;

  int32_t s_q, s_kv, topk;
  uint32_t topk_reciprocal;        // (2^32 - 1) / topk
  uint32_t chunks, chunk_queries;  // of each chunk but the last, which may have fewer
  uint32_t group_tokens;           // that a warp of `order` takes at a time, up to 32
  uint32_t has_dependent;          // of `list`: 1 where `order` comes next, else 0
};

// Entries of a batch entry, valid or not.
__device__ __forceinline__ int32_t all_entries(const Parameters& params) { return params.s_q * params.topk; }

// Of a chunk.
__device__ __forceinline__ uint32_t first_query_of(const Parameters& params, uint32_t chunk) {
  return chunk * params.chunk_queries;
}
__device__ __forceinline__ uint32_t queries_of(const Parameters& params, uint32_t chunk) {
  return min(params.chunk_queries, static_cast<uint32_t>(params.s_q) - first_query_of(params, chunk));
}

// The entries of the chunk that begins with `first_query`.
__device__ __forceinline__ int32_t* scattered_of(const Parameters& params, int32_t batch, uint32_t first_query) {
  return params.scattered + (static_cast<int64_t>(batch) * params.s_q + first_query) * params.topk;
}

__device__ __forceinline__ int32_t* row_ends_of(const Parameters& params, int32_t batch, uint32_t chunk) {
  return params.row_ends + batch * params.row_ends_batch + static_cast<int64_t>(chunk) * params.s_kv;
}

__device__ __forceinline__ int32_t* entries_of(const Parameters& params, int32_t batch) {
  return params.entries + batch * params.entries_batch;
}

// Entries of a query that can be valid.
__device__ __forceinline__ int32_t length_of(const Parameters& params, int32_t batch, int32_t query) {
  if (params.topk_length == nullptr) return params.topk;
  const int64_t place = batch * params.topk_length_batch + query * params.topk_length_query;
  return max(0, min(params.topk, params.topk_length[place]));
}

}  // namespace cupymla::invert_indices
