// Parameter record of stage `order`. Python mirrors it as `OrderParameters` in cupymla/ops/sparse_mla_fwd/order.py; the
// sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr int kMaxOrderTokens = 1 << 18;  // of a batch entry
constexpr int kMaxOrderEntries = 4096;    // of a query

struct OrderParameters {
  const int32_t* indices;      // [batch, s_q, topk]
  const int32_t* topk_length;  // [batch, s_q] or null
  int32_t* lists;              // [batch, s_q, topk], contiguous
  int32_t* lengths;            // [batch, s_q], contiguous: how many entries of a list there are

  int64_t indices_batch, indices_query;  // strides, in elements
  int64_t topk_length_batch, topk_length_query;

  int64_t q_start;   // position of query 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t s_q, s_kv, topk;
  int32_t causal;  // 0 or 1
};

}  // namespace cupymla::sparse_mla_fwd
