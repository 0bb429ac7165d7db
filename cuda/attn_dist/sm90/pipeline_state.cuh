// Where a consumer is in the ring of buffers.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct PipelineState {
  int buffer = 0;
  uint32_t parity = 0;  // of full[buffer]

  __device__ __forceinline__ void advance() {
    buffer = buffer + 1 == Config::kBuffers ? 0 : buffer + 1;
    if (buffer == 0) parity ^= 1u;
  }
};

}  // namespace cupymla::attn_dist
