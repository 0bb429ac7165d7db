// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/merge_attention/cuda.py; the sizes
// are compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::merge_attention {

constexpr int kAxes = 3;  // outer rows, inner rows, heads

struct Parameters {
  const uint8_t* outs;     // [parts, rows, heads, d_v] floats
  const float* lses;       // [parts, rows, heads]
  const float* attn_sink;  // [heads] or null
  uint8_t* out;            // [rows, heads, d_v] in the type of outs
  float* lse;              // [rows, heads]
  int64_t outs_strides[kAxes];  // in elements, as all strides here
  int64_t lses_strides[kAxes];
  int64_t out_strides[kAxes];
  int64_t lse_strides[kAxes];
  int64_t outs_part, lses_part;
  int64_t attn_sink_head;
  int64_t rows;   // outer times inner
  int32_t inner;  // rows of an outer one
  int32_t heads, parts, d_v;
  int32_t type;   // FloatType of outs
  int32_t base2;  // 1: logarithms are to base 2; the sink is natural all the same
};

}  // namespace cupymla::merge_attention
