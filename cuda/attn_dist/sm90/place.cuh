// Where a consumer is in the ring of buffers.
#pragma once

#include "../../common/integers.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Place {
  int buffer = 0;
  uint32_t bits = 0;  // 0: parity of full[buffer], 1: of the awaited phase of order[]; together, to spare a register

  __device__ __forceinline__ uint32_t parity() const { return bits & 1u; }
  __device__ __forceinline__ uint32_t order() const { return bits >> 1; }

  __device__ __forceinline__ void advance() {
    buffer = buffer + 1 == Config::kBuffers ? 0 : buffer + 1;
    if (buffer == 0) bits ^= 1u;
  }
  __device__ __forceinline__ void advance_order() { bits ^= 2u; }

  // The buffer so many positions back.
  __device__ __forceinline__ int before(int positions) const {
    const int previous = buffer - positions;
    return previous < 0 ? previous + Config::kBuffers : previous;
  }
};

}  // namespace cupymla::attn_dist
