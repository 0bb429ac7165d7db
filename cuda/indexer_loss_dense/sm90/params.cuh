// Parameter record of every stage. Python mirrors it as `Parameters` in cupymla/ops/indexer_loss_dense/cuda.py; the
// sizes are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/element.cuh"
#include "../../common/types.cuh"

namespace cupymla::indexer_loss_dense {

// A launch works on `queries` queries of one batch entry, its row block. Pointers are to the batch entry's first
// element, those of what there is for each query to the row block's first.
struct Parameters {
  const Element* q;        // [queries, heads, channels]
  const Element* k;        // [keys, channels]
  const uint8_t* weights;  // [queries, heads], fp32 or bf16
  const float* mla_lse;    // [queries, mla_heads] or null: stage `lse` has computed them
  const int32_t* starts;   // [queries] or null: 0
  const int32_t* ends;     // [queries] or null: keys
  const float* grad_loss;  // [queries] or null: 1
  float* loss;             // [queries]
  Element* dq;             // [queries, heads, channels]
  uint8_t* dk;             // [keys, channels], of `dk_type`
  uint8_t* dweights;       // [queries, heads], fp32 or bf16 as the weights

  // Workspace. Rows of the row block, a multiple of four of them, `row_stride` keys apart.
  float2* lse;          // [rows, mla_heads]: largest score in units of log2, and 1 over the sum of what it leaves
  float* target;        // [rows, row_stride]
  float* gradients;     // [rows, row_stride]: scores, then the loss's gradient with respect to them
  int32_t* states;      // [rows]: a `State`
  int32_t* bounds;      // [rows, 2]: first visible key, and the one behind the last
  float* largest;       // [rows]: of a row's absolute gradients
  float* largest_term;  // of all rows: largest gradient times largest weight
  uint32_t* bad_keys;   // [row_stride / 32]: a bit for each key that has a number which is not finite
  float* sums;          // [slices, row_stride, channels]: of dk

  // Strides, in elements.
  int64_t q_query, q_head;
  int64_t k_key;
  int64_t weights_query, weights_head;
  int64_t mla_lse_query, mla_lse_head;
  int64_t starts_query, ends_query, grad_loss_query, loss_query;
  int64_t dq_query, dq_head;
  int64_t dk_key;
  int64_t dweights_query, dweights_head;
  int64_t row_stride;

  int64_t q_start;   // position of the row block's first query, for the causal limit
  int64_t k_stride;  // positions per key, for the causal limit

  int32_t batch, first_query;  // where the row block lies, for tensor maps
  int32_t queries, keys, heads, mla_heads;
  int32_t chunk_rows;    // of a CTA of stage `target`, a multiple of four
  int32_t slices;        // of the rows, in stage `dk`
  int32_t slice_rows;    // of each, a multiple of four
  int32_t splits_keys;   // 1: consumers of a CTA of stage `dq` share a column tile; 0: each has its own
  int32_t adds;          // 0 for the first row block of a batch entry, whose sums nobody has written yet
  int32_t bf16_weights;  // 0: fp32
  int32_t causal;        // 0 or 1
  int32_t relu;          // 0 or 1
  int32_t dk_type;       // 0 bf16, 1 fp16, 2 fp32
  float scale_log2;      // sm_scale * log2(e)
  float unit, unit_rest;  // together what turns units of `mla_lse` into those of log2
};

// What becomes of a row: kLeftOut sees no key, or is none. What is kSpoilt has NaN in its gradients. Neither takes part
// in products.
enum State : int32_t { kSound = 0, kLeftOut = 1, kSpoilt = 2 };

}  // namespace cupymla::indexer_loss_dense
