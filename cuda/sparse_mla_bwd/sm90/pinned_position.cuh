// A query's position, and a thread's number, for addresses that are worked out where they are used.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/sparse_query.cuh"

namespace cupymla::sparse_mla_bwd {

// For addresses that are used once in a head block or block: worked out before it, they would be kept, and spilled, all
// the time.
__device__ __forceinline__ QueryPosition pinned_position(QueryPosition position) {
  make_opaque(position.batch);
  make_opaque(position.query);
  return position;
}

// A thread's number among so many, a power of two. By a shuffle: else ptxas asks for it anew wherever it is wanted, in
// one queue with reductions, or works out ahead of a loop, and spills, what follows from it.
__device__ __forceinline__ uint32_t numbered_thread(uint32_t threads) {
  return __shfl_sync(0xffffffffu, threadIdx.x % threads, threadIdx.x % 32);
}

}  // namespace cupymla::sparse_mla_bwd
