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
  int32_t causal;    // 0 or 1
  int32_t lse_base2;  // 0: natural logarithms; 1: to base 2
};

// Of the kernels around a filter; there is one batch entry. Mirrored by `FilterParameters` in the same file.
struct FilterParameters : Parameters {
  float* thresholds;        // [rows]
  uint32_t* counts;         // [rows]: entries that reached them; more than a list has room for where they are
  const uint8_t* entries;   // [rows, capacity] scores and columns, as `Entry` in cuda/indexer_logits/sm90/params.cuh
  int32_t* flagged_starts;  // [rows]: visible columns of flagged rows, 0 of others
  int32_t* flagged_ends;    // [rows]
  int32_t* flagged;         // [chunks]: how many rows of a chunk are

  int32_t sample_stride;  // keys from one of the sample to the next
  int32_t chunks, chunk_rows;
};

}  // namespace cupymla::indexer_topk
