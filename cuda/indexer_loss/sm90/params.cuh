// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/indexer_loss/cuda.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/element.cuh"
#include "../../common/types.cuh"

namespace cupymla::indexer_loss {

struct Parameters {
  const Element* q;            // [batch, queries, heads, channels]
  const Element* k;            // [batch, keys, channels]
  const uint8_t* weights;      // [batch, queries, heads], fp32 or bf16
  const int32_t* indices;      // [batch, queries, topk]
  const float* target;         // [batch, queries, topk]
  const int32_t* topk_length;  // [batch, queries] or null: topk
  const float* lse;            // [batch, queries] or null: of the valid scores
  float* loss;                 // [batch, queries]
  float* grad_logits;          // [batch, queries, topk]

  // Strides, in elements.
  int64_t q_batch, q_query, q_head;
  int64_t k_batch, k_key;
  int64_t weights_batch, weights_query, weights_head;
  int64_t indices_batch, indices_query;
  int64_t target_batch, target_query;
  int64_t topk_length_batch, topk_length_query;
  int64_t lse_batch, lse_query;
  int64_t loss_batch, loss_query;
  int64_t grad_logits_batch, grad_logits_query;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t queries, keys, heads, topk;
  int32_t bf16_weights;  // 0: fp32
  int32_t causal;        // 0 or 1
  float floor;           // of a product: 0, or -inf where there is no ReLU
};

}  // namespace cupymla::indexer_loss
