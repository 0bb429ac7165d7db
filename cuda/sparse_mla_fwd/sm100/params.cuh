// Parameter record of the sm_100f kernels. Python mirrors it as `BlackwellParameters` in
// cupymla/ops/sparse_mla_fwd/binding.py; the sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::sparse_mla_fwd {

struct Parameters {
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  const float* attn_sink;      // [h_q] or null
  uint8_t* out;                // [batch, s_q, h_q, 512] 16-bit elements
  float* max_logits;           // [batch, s_q, h_q]
  float* lse;                  // [batch, s_q, h_q]

  // Strides: in bytes where the name says so, in elements elsewhere.
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t attn_sink_head;
  int64_t out_batch_bytes, out_query_bytes, out_head_bytes;
  int64_t max_logits_batch, max_logits_query, max_logits_head;
  int64_t lse_batch, lse_query, lse_head;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t token_rows, batch_rows;  // rows of the KV map from one token, and one batch entry, to the next
  int32_t s_q, s_kv, h_q, topk;
  uint32_t head_blocks;  // CTA pairs, or CTAs by themselves, that share a query's heads
  uint32_t items;        // queries of all batch entries x head_blocks
  int32_t causal;        // 0 or 1
  float scale_log2;      // sm_scale * log2(e)
  float max_unit;        // natural units to a unit of a head's maximum
  float base_unit;       // units of lse to one of a base, rounded
  float base_unit_rest;  // what that rounding leaves
  float lse_unit;        // 1 for base 2, ln 2 for base e
};

}  // namespace cupymla::sparse_mla_fwd
