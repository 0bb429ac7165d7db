// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/topk/cuda.py; the sizes are compared
// when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::topk {

struct Parameters {
  const uint8_t* scores;  // [batch, rows, columns]
  const int32_t* starts;  // [batch, rows] or null: 0
  const int32_t* ends;    // [batch, rows] or null: columns
  int32_t* indices;       // [batch, rows, topk]
  int32_t* count;         // [batch, rows]
  uint8_t* values;        // [batch, rows, topk] in the scores' type, or null

  // Strides, in elements.
  int64_t scores_batch, scores_row;
  int64_t starts_batch, starts_row;
  int64_t ends_batch, ends_row;
  int64_t indices_batch, indices_row;
  int64_t count_batch, count_row;
  int64_t values_batch, values_row;

  int32_t rows;  // of a batch entry
  int32_t columns, topk;
  int32_t by_score;       // 0: ids ascend; 1: scores descend
  int32_t capacity;       // candidates that shared memory holds
  int32_t streamed;       // 0: rows are always read whole, as with a topk past the capacity
  int32_t bitmap_words;   // columns, and the place of the first one in its 16 bytes, that the bitmap covers, over 32
  int32_t sorted;         // entries that can be sorted in one piece, a power of two; 0 unless by_score
};

}  // namespace cupymla::topk
