// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/indexer_logits/cuda.py; the sizes
// are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::indexer_logits {

struct Parameters {
  const uint8_t* weights;  // [batch, queries, heads], fp32 or bf16
  const float* q_scale;    // [batch, queries, heads] or null
  const float* k_scale;    // [batch, keys] or null
  const int32_t* starts;   // [batch, queries] or null: 0
  const int32_t* ends;     // [batch, queries] or null: keys
  float* logits;           // [batch, queries, keys]

  // Strides, in elements.
  int64_t weights_batch, weights_query, weights_head;
  int64_t q_scale_batch, q_scale_query, q_scale_head;
  int64_t k_scale_batch, k_scale_key;
  int64_t starts_batch, starts_query;
  int64_t ends_batch, ends_query;
  int64_t logits_batch, logits_query;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t batch, queries, keys, heads;
  int32_t query_tiles, key_tiles;  // of a batch entry; of a query tile
  int32_t bf16_weights;            // 0: fp32
  int32_t causal;                  // 0 or 1
  float floor;                     // of a product: 0, or -inf where there is no ReLU
  int32_t fills;                   // whether what a query does not see is written, as -inf
  int32_t has_dependent;           // whether another kernel of the call comes next
};

}  // namespace cupymla::indexer_logits
