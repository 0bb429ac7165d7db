// Parameter record of every stage. Python mirrors it as `Parameters` in cupymla/ops/indexer_bwd/cuda.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/element.cuh"
#include "../../common/types.cuh"

namespace cupymla::indexer_bwd {

struct Parameters {
  const Element* q;            // [batch, queries, heads, channels]
  const Element* k;            // [batch, keys, channels]
  const uint8_t* weights;      // [batch, queries, heads], fp32 or bf16
  const float* grad_logits;    // [batch, queries, topk]
  const int32_t* indices;      // [batch, queries, topk]
  const int32_t* topk_length;  // [batch, queries] or null: topk
  Element* dq;                 // [batch, queries, heads, channels]
  uint8_t* dk;                 // [batch, keys, channels], of `dk_type`
  uint8_t* dweights;           // [batch, queries, heads], fp32 or bf16 as the weights

  // Workspace, zeros at first. What dk is rounded from, [batch, keys, channels]: fp32, or int32 where the result is
  // deterministic. Then also what fixed_point.cuh says; and for each channel whether +inf and whether -inf was to be
  // added, NaN counting as both.
  uint8_t* sums;
  int64_t* totals;       // [batch, keys]
  uint32_t* non_finite;  // [batch, keys, channels / 32, 2]
  float* query_bounds;   // [batch, queries]
  float* channel_parts;  // [batch, channels]
  float* largest;        // [batch]

  // Strides, in elements.
  int64_t q_batch, q_query, q_head;
  int64_t k_batch, k_key;
  int64_t weights_batch, weights_query, weights_head;
  int64_t grad_logits_batch, grad_logits_query;
  int64_t indices_batch, indices_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t dq_batch, dq_query, dq_head;
  int64_t dk_batch, dk_key;
  int64_t dweights_batch, dweights_query, dweights_head;

  int64_t q_start;        // position of query 0, for the causal limit
  int64_t k_stride;       // positions per key, for the causal limit
  int64_t zeroed_chunks;  // of 16 bytes, from `sums` on

  int32_t batch, queries, keys, heads, topk;
  int32_t bf16_weights;  // 0: fp32
  int32_t causal;        // 0 or 1
  int32_t relu;          // 0 or 1
  int32_t dk_type;       // 0 bf16, 1 fp16, 2 fp32
  int32_t adds_log2;     // at most 2^adds_log2 entries name a key; at most 29
  int32_t range_keys;    // whose totals a CTA of `total` has in shared memory; 0: it adds to those in L2
};

}  // namespace cupymla::indexer_bwd
