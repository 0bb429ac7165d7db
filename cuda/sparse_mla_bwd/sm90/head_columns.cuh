// How dQ leaves a warpgroup's accumulators.
#pragma once

#include "../../common/math.cuh"

namespace cupymla::sparse_mla_bwd {

// Writes heads x 32 columns, where this thread has the rows of `head` and the one eight behind it, below `heads`. Each
// thread has two neighbouring columns of every eight in its rows; the four lanes of a row exchange them so that each
// stores sixteen bytes, and the quad 64 bytes side by side.
template <typename Element>
__device__ __forceinline__ void store_head_columns(uint8_t* query_start, int32_t head, int32_t heads,
                                                   int64_t head_bytes, int32_t column, const float* values, int lane) {
  const int quad_lane = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack_pair<Element>(values[j * 4 + 2 * r], values[j * 4 + 2 * r + 1]);
    quad_transpose(words, quad_lane);
    if (head + 8 * r < heads) {
      uint8_t* line = query_start + (head + 8 * r) * head_bytes + column * 2 + quad_lane * 16;
      *reinterpret_cast<uint4*>(line) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
