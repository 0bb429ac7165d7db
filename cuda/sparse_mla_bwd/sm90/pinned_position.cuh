// A query's position, for addresses that are worked out where they are used.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/sparse_query.cuh"

namespace cupymla::sparse_mla_bwd {

// For addresses that are used once in a head block or block: worked out before it, they would be kept, and spilled, all
// the time.
__device__ __forceinline__ QueryPosition pinned_position(QueryPosition position) {
  make_opaque(position.batch);
  return position;
}

}  // namespace cupymla::sparse_mla_bwd
