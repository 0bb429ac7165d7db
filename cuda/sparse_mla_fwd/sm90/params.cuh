// Parameter record of the sm_90a kernel. Python mirrors it as `Parameters` in cupymla/ops/sparse_mla_fwd/binding.py;
// the sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::sparse_mla_fwd {

struct Parameters {
  const uint8_t* kv;           // [batch, s_kv, d_qk] 16-bit elements
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  const float* attn_sink;      // [h_q] or null
  uint8_t* out;                // [batch, s_q, h_q, 512] 16-bit elements
  float* max_logits;           // [batch, s_q, h_q]
  float* lse;                  // [batch, s_q, h_q]

  // Strides: in bytes where the name says so, in elements elsewhere.
  int64_t kv_batch_bytes, kv_token_bytes;
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t attn_sink_head;
  int64_t out_batch_bytes, out_query_bytes, out_head_bytes;
  int64_t max_logits_batch, max_logits_query, max_logits_head;
  int64_t lse_batch, lse_query, lse_head;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t s_q, s_kv, h_q, topk;
  int32_t head_blocks;  // CTAs that share a query
  uint32_t groups, group_tokens;  // the first CTAs take that many queries each, the others one
  int32_t causal;       // 0 or 1
  float scale_log2;     // sm_scale * log2(e)
  float max_unit;       // natural units to a unit of a head's maximum
  float base_unit;      // units of lse to one of a base, rounded
  float base_unit_rest; // what that rounding leaves
  float lse_unit;       // 1 for base 2, ln 2 for base e
};

}  // namespace cupymla::sparse_mla_fwd
