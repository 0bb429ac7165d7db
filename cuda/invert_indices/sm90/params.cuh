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
  int32_t* scattered;          // workspace [batch, s_q * topk]: each token's entries in chance order; null without any

  // Strides in elements.
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t offsets_batch, entries_batch;

  int32_t s_q, s_kv, topk;
  uint32_t topk_reciprocal;  // (2^32 - 1) / topk
  uint32_t group_tokens;     // that a CTA of `order` takes at a time, at most one for each of its warps
  uint32_t has_dependent;    // of `list`: 1 where `order` comes next, else 0
};

// Entries of a batch entry, valid or not.
__device__ __forceinline__ int32_t all_entries(const Parameters& params) { return params.s_q * params.topk; }

__device__ __forceinline__ const int32_t* scattered_of(const Parameters& params, int32_t batch) {
  return params.scattered + static_cast<int64_t>(batch) * all_entries(params);
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
