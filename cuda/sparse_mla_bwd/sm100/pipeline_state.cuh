// Which buffers and phases of barriers a block meets.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::sparse_mla_bwd {

// Counts blocks, over all head blocks.
template <uint32_t kSets>
struct PipelineState {
  uint32_t count = 0;

  // Of the phase that a barrier met once a block is in.
  __device__ __forceinline__ uint32_t parity() const { return count & 1u; }

  // Which set of tokens is the block's, and the phase that a barrier of this set is in.
  __device__ __forceinline__ uint32_t set() const { return count % kSets; }
  __device__ __forceinline__ uint32_t set_parity() const { return count / kSets & 1u; }

  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace cupymla::sparse_mla_bwd
