// Parameter record of the tcgen05 kernel. Python mirrors it as `Parameters` in cupymla/ops/nvfp4_gemv/tiles.py; the
// sizes are compared when a call is bound, the fields by the tests. a, b and their scales come by tensor maps.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

struct Parameters {
  const float* alpha;   // [batch, m] or null
  const uint8_t* bias;  // [batch, m] in c's type or null
  uint8_t* c;           // [batch, m, n]

  // Strides in elements.
  int64_t alpha_batch, alpha_row;
  int64_t bias_batch, bias_row;
  int64_t c_batch, c_row, c_column;

  int64_t m;
  int64_t k;          // elements of a row, even
  uint32_t n;         // columns, 1 to 16
  uint32_t tiles;     // of 128 rows, per batch
  float alpha_value;  // the factor where alpha is null
  int32_t out_type;   // FloatType in ../floats.cuh
};

}  // namespace cupymla::nvfp4_gemv
