// Parameter record of every stage. Python mirrors it as `Parameters` in cupymla/ops/sparse_mla_bwd/cuda.py; the sizes
// are compared when a call is bound, the fields by the tests.
#pragma once

#include "../common/types.cuh"

namespace cupymla::sparse_mla_bwd {

struct Parameters {
  const uint8_t* kv;           // [batch, s_kv, d_qk] 16-bit elements
  const uint8_t* out;          // [batch, s_q, h_q, 512] 16-bit elements
  const float* lse;            // [batch, s_q, h_q]
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  const float* attn_sink;      // [h_q] or null
  float* attn_dist;            // [batch, s_q, topk] or null
  uint8_t* dq;                 // [batch, s_q, h_q, d_qk] 16-bit elements
  uint8_t* dkv;                // [batch, s_kv, d_qk] 16-bit elements; null where `sums` is the result
  float* d_sink;               // [h_q] or null
  float* sums;                 // [batch, s_kv, d_qk], what dkv is rounded from
  float* sink_terms;           // workspace [batch * s_q, h_q]: what each query adds to d_sink; null without a sink
  float* partials;             // workspace [query_end - query_begin, topk, d_qk]: what each entry adds to sums
  int32_t* row_ends;           // workspace [batch * s_kv]: where each token's part of `entry_list` ends
  int32_t* entry_list;         // workspace [query_end - query_begin, topk]: entries by the token that they name
  // Workspace of packed queries, or of queries in the order of tokens (query_group.cuh): for each query group its
  // list, which top-k entry of each query a row entry stands for (null where nobody asks), and how many entries there
  // are; where a query group is one query, the distribution by row entries (or null), else which rows need care.
  int32_t* rows;               // [query_end - query_begin, queries of a query group * topk]
  uint16_t* row_topk_entries;  // [query_end - query_begin, queries of a query group * topk, queries of a query group]
  uint32_t* row_counts;        // [query_end - query_begin]
  float* listed_dist;          // [query_end - query_begin, topk]
  uint8_t* non_finite_rows;    // [batch * s_kv]: not 0 for tokens whose row of kv has a number that is not finite

  // Strides: in bytes where the name says so, in elements elsewhere.
  int64_t kv_batch_bytes, kv_token_bytes;
  int64_t out_batch_bytes, out_query_bytes, out_head_bytes;
  int64_t lse_batch, lse_query, lse_head;
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t attn_sink_head;
  int64_t attn_dist_batch, attn_dist_query;
  int64_t dq_batch_bytes, dq_query_bytes, dq_head_bytes;
  int64_t dkv_batch_bytes, dkv_token_bytes;
  int64_t d_sink_head;
  int64_t sums_batch, sums_token;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit
  int64_t kv_rows;   // batch * s_kv

  int32_t s_q, s_kv, h_q, topk;
  // Queries of all batch entries that this launch takes; of `merge`, and the attention after it, query groups of them.
  uint32_t query_begin, query_end;
  int32_t head_blocks;  // how many times a query's CTAs go through its entries, for 64 heads per CTA each time
  int32_t batch_rows, token_rows;   // rows of the kv map from one batch entry, or token, to the next, on sm_100f
  int32_t causal;     // 0 or 1
  int32_t has_dependent;  // 1 where another kernel of the call comes next, else 0
  float sm_scale;
  float scale_log2;   // sm_scale * log2(e)
  float unit;         // the largest part of what turns lse into units of log2, off as scale_log2 is by its rounding
  float unit_rest;    // the rest of it
  float lse_to_log2;  // 1 for base 2, log2(e) for base e
  float sink_to_lse;  // log2(e) for base 2, 1 for base e

  uint8_t* p_ds;     // workspace: P and dS of the entries of the launch's queries (sm90/stored_p_ds.cuh)
  const int32_t* lists;  // [batch, s_kv + 1 + s_q * topk], the caller's lists of entries by token, or null
  int64_t lists_batch;
};

}  // namespace cupymla::sparse_mla_bwd
