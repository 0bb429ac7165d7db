// Parameter records of the two kernels. Python mirrors them in cupymla/ops/paged_indexer_topk/cuda.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../topk/sm80/params.cuh"

namespace cupymla::paged_indexer {

// What both kernels know of the requests. Lengths and tables hold anything.
struct Paged {
  const int32_t* block_tables;  // [requests, width]
  const int32_t* context_lens;  // [requests] or [requests, queries]

  // Strides, in elements.
  int64_t tables_request, tables_block;
  int64_t lens_request, lens_query;

  int32_t requests, queries;
  int32_t columns;        // keys that a request has at most; tables have blocks for them
  int32_t lens_by_query;  // 0: a request's length is that of its last query, and each before it sees one key less
  int32_t page, blocks;   // keys of a block; blocks of the cache
};

struct ScoringParameters {
  Paged paged;
  const uint8_t* cache;
  const uint8_t* weights;  // [requests, queries, heads], fp32 or bf16
  const float* q_scale;    // [requests, queries, heads] or null
  float* logits;           // [requests, queries, columns]

  // Strides, in elements.
  int64_t weights_request, weights_query, weights_head;
  int64_t q_scale_request, q_scale_query, q_scale_head;
  int64_t logits_request, logits_query;

  int64_t block_bytes, row_bytes;  // from a block to the next, from a key to the next in its block
  int64_t scales_offset;           // with fp8: from a block's first byte to its scales

  int32_t heads, query_tiles;
  int32_t fill_end;      // -inf is written from a query's last key to here; 0: nothing is
  int32_t bf16_weights;  // 0: fp32
  int32_t wide_copies;   // 0: keys lie at multiples of 4 bytes only; 1: of 16
  int32_t box_keys;      // keys of a block that a tensor copy brings in, a power of two; 0: there is no map of keys
  float floor;           // of a product: 0, or -inf where there is no ReLU
};

struct SelectionParameters : topk::Parameters {
  Paged paged;
  float* lse;  // [requests, queries] or null
  int64_t lse_batch, lse_row;
  int32_t lse_base2;  // 0: natural logarithms; 1: to base 2
  int32_t slots;      // 0: ids are positions in the request; 1: slots of the cache
};

}  // namespace cupymla::paged_indexer
