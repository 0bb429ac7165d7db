// A row of dQ's accumulators to memory.
#pragma once

#include "../../common/math.cuh"

namespace cupymla::sparse_mla_bwd {

// Stores 32 columns of a row, which begin at `to`, if the row `exists`. Each thread has two neighbouring columns of
// every eight: the first two of the sixteen `values` of its two rows, four further on the next ones. The four lanes of
// a row exchange them so that each stores sixteen bytes, and the quad 64 bytes side by side.
template <typename Element>
__device__ __forceinline__ void store_query_gradient_columns(uint8_t* to, bool exists, const float* values,
                                                             int quad_lane) {
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = pack_pair<Element>(values[j * 4], values[j * 4 + 1]);
  quad_transpose(words, quad_lane);
  if (exists) *reinterpret_cast<uint4*>(to + quad_lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace cupymla::sparse_mla_bwd
