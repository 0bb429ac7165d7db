// Parameter record. Python mirrors it as `Parameters` in cupymla/ops/sparse_mla_bwd_phase1/cuda.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

struct Parameters {
  const uint8_t* out;          // [batch, s_q, h_q, 512] 16-bit elements
  const uint8_t* dout;         // [batch, s_q, h_q, 512] 16-bit elements
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  float* p;                    // [batch, s_q, h_q, topk]
  float* delta;                // [batch, s_q, h_q]

  // Strides: in bytes where the name says so, in elements elsewhere.
  int64_t out_batch_bytes, out_query_bytes, out_head_bytes;
  int64_t dout_batch_bytes, dout_query_bytes, dout_head_bytes;
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t p_batch, p_query, p_head;
  int64_t delta_batch, delta_query, delta_head;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t s_q, s_kv, h_q, topk;
  int32_t batch_rows, token_rows;  // rows of the kv map from one batch entry, or token, to the next
  uint32_t groups, group_tokens;   // how queries are assigned to CTA pairs; see `QueryRange`
  uint32_t head_block_clusters;    // CTA pairs for one block of 128 heads
  int32_t causal;                  // 0 or 1
};

}  // namespace cupymla::sparse_mla_bwd_phase1
