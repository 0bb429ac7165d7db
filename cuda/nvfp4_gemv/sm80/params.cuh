// Parameter record of the kernel. Python mirrors it as `Parameters` in cupymla/ops/nvfp4_gemv/cuda.py; the sizes are
// compared when a call is bound, the fields by the tests.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

// How scales lie in memory, and in what pieces they may be copied.
enum ScaleAccess : int32_t {
  kScalesByBytes = 0,
  kScalesByRows = 1,  // linear, rows that may be copied whole: 16 scales of NVFP4 or 8 of MXFP4 at a time
  kScalesByWords = 2, // linear or 128x4, four at a time
};

struct Parameters {
  const uint8_t* a;    // [batch, m, k/2] E2M1 pairs
  const uint8_t* sfa;  // [batch, m, ceil(k/block)], or 128x4 blocks
  const uint8_t* b;    // [batch, n, k/2] E2M1 pairs, or [batch, n, k] 16-bit floats
  const uint8_t* sfb;  // [batch, n, ceil(k/block)], or 128x4 blocks; null in weight-only mode
  const float* alpha;  // [batch, m] or null
  const uint8_t* bias; // [batch, m] in c's type or null
  uint8_t* c;          // [batch, m, n]

  // Strides: in bytes where the name says so, in elements elsewhere. 128x4 scales have no row stride.
  int64_t a_batch_bytes, a_row_bytes;
  int64_t sfa_batch_bytes, sfa_row_bytes;
  int64_t b_batch_bytes, b_row_bytes;
  int64_t sfb_batch_bytes, sfb_row_bytes;
  int64_t alpha_batch, alpha_row;
  int64_t bias_batch, bias_row;
  int64_t c_batch, c_row, c_column;

  int64_t part_rows;     // rows of an item of work
  int64_t k;             // elements of a row, even
  uint32_t n;            // columns, 1 to 16
  uint32_t parts;        // items of work that a batch is divided into, each a range of rows
  uint32_t long_parts;   // the first so many parts have one row more
  uint32_t items;        // parts of all batches
  uint32_t phase_chunks; // chunks of k of which shared memory holds b at a time
  float alpha_value;     // the factor where alpha is null

  int32_t out_type;      // FloatType in floats.cuh
  int32_t swizzled;      // 1: scales are in the 128x4 layout
  int32_t a_aligned;     // 1: every row of a begins at a multiple of 16 bytes
  int32_t b_aligned;     // the same of b
  int32_t sfa_access;    // ScaleAccess
};

}  // namespace cupymla::nvfp4_gemv
