// Where a consumer is in the ring of buffers.
#pragma once

#include "../../common/integers.cuh"

namespace cupymla::attn_dist {

// In one number, to spare registers.
template <typename Config>
struct Place {
  uint32_t bits = 0;  // 0 and 1: buffer, 2: parity of full[buffer], 3: of the awaited phase of order[]

  static_assert(Config::kBuffers <= 4);

  __device__ __forceinline__ int buffer() const { return static_cast<int>(bits & 3u); }
  __device__ __forceinline__ uint32_t parity() const { return bits >> 2 & 1u; }
  __device__ __forceinline__ uint32_t order() const { return bits >> 3 & 1u; }

  __device__ __forceinline__ void advance() { bits = buffer() + 1 == Config::kBuffers ? (bits & ~3u) ^ 4u : bits + 1; }
  __device__ __forceinline__ void advance_order() { bits ^= 8u; }

  // The buffer so many positions back.
  __device__ __forceinline__ int before(int positions) const {
    const int previous = buffer() - positions;
    return previous < 0 ? previous + Config::kBuffers : previous;
  }
};

}  // namespace cupymla::attn_dist
