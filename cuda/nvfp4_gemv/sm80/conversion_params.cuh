// Parameter records of the conversion kernels. Python mirrors them in cupymla/ops/nvfp4_gemv/conversions.py.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

// amax: the largest finite magnitude that each CTA finds.
struct AmaxParameters {
  const uint8_t* x;  // [batch, m, k] floats
  float* partial;    // [CTAs]
  int64_t x_batch, x_row;  // in elements
  int64_t m, k, batches;
  int32_t type;  // FloatType
};

struct QuantizeParameters {
  const uint8_t* x;      // [batch, m, k] floats
  uint8_t* packed;       // [batch, m, k/2]
  uint8_t* scales;       // [batch, m, ceil(k/block)], or whole 128x4 blocks
  const float* factor;   // one value that x is multiplied with, or null
  const float* partial;  // [partials] amax of parts of x, from which the factor is made, or null
  float* made_factor;    // where that factor is written
  int64_t x_batch, x_row;  // in elements
  int64_t packed_batch, packed_row;
  int64_t scales_batch, scales_row;
  int64_t m, k, batches;
  float factor_value;  // where neither `factor` nor `partial` is given
  int32_t partials;
  int32_t type;      // FloatType
  int32_t swizzled;  // 1: the 128x4 layout, zeros in its padding
};

struct DequantizeParameters {
  const uint8_t* packed;  // [batch, m, k/2]
  const uint8_t* scales;  // [batch, m, ceil(k/block)], or 128x4 blocks
  const float* factor;    // one value to divide by, or null
  uint8_t* out;           // [batch, m, k] floats
  int64_t packed_batch, packed_row;
  int64_t scales_batch, scales_row;
  int64_t out_batch, out_row;  // in elements
  int64_t m, k, batches;
  float factor_value;  // where `factor` is null
  int32_t type;        // FloatType
  int32_t swizzled;
};

struct SwizzleParameters {
  const uint8_t* source;  // [batch, rows, columns], or whole 128x4 blocks
  uint8_t* target;        // the other
  int64_t source_batch, source_row;
  int64_t target_batch, target_row;
  int64_t rows, columns, batches;  // of the linear matrix
  int32_t backwards;               // 1: from 128x4 to linear
};

}  // namespace cupymla::nvfp4_gemv
