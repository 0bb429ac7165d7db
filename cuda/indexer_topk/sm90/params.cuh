// Parameter record of the kernel: topk's, and its own. Mirrored by `Parameters` in cupymla/ops/indexer_topk/cuda.py.
// Sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../topk/sm80/params.cuh"

namespace cupymla::indexer_topk {

struct Parameters : topk::Parameters {
  float* lse;  // [batch, rows] or null
  int64_t lse_batch, lse_row;

  int64_t q_start;   // position of row 0, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit
  int32_t causal;         // 0 or 1
  int32_t lse_base2;      // 0: natural logarithms; 1: to base 2
  int32_t has_dependent;  // whether another kernel of the call comes next
};

}  // namespace cupymla::indexer_topk
