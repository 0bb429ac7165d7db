// Parameter record of the kernel. Python mirrors it as `Blackwell` in cupymla/ops/attn_dist/records.py; the sizes
// are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::attn_dist {

struct Parameters {
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  const float* lse;            // [batch, s_q, h_q]
  float* dist;                 // [batch, s_q, topk]

  // Strides in elements.
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t lse_batch, lse_query, lse_head;
  int64_t dist_batch, dist_query;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t s_q, s_kv, h_q, topk;
  int32_t token_rows, batch_rows;  // rows of the KV map from one token, and one batch entry, to the next
  uint32_t queries;                // over all batch entries
  int32_t slices, slice_blocks;    // parts that a query's entries are assigned in, and blocks of each
  int32_t causal;                  // 0 or 1
  int32_t normalize;               // 1: rows are divided by their sum; then there is one slice
  float scale_log2;  // sm_scale * log2(e)
  float unit, unit_rest;  // together what turns units of `lse` into those of log2
};

}  // namespace cupymla::attn_dist
