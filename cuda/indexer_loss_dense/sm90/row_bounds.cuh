// Which keys a row sees, and which tiles of them several rows see.
#pragma once

#include "../../common/indexer_score.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss_dense {

// Visible keys: `begin` <= key < `end`; {0, 0} where there are none.
struct Bounds {
  int32_t begin, end;

  __device__ __forceinline__ bool is_empty() const { return begin >= end; }
};

__device__ __forceinline__ Bounds visible_keys(const Parameters& params, int32_t row) {
  if (row >= params.queries) return {0, 0};
  Bounds bounds{0, params.keys};
  if (params.starts != nullptr) bounds.begin = max(0, params.starts[row * params.starts_query]);
  if (params.ends != nullptr) bounds.end = min(bounds.end, params.ends[row * params.ends_query]);
  if (params.causal != 0) bounds.end = indexer::causal_end(params.q_start, row, params.k_stride, bounds.end);
  return bounds.is_empty() ? Bounds{0, 0} : bounds;
}

// From the first to the last key that any of the rows from `first` on sees.
template <int kRows>
__device__ __forceinline__ Bounds visible_to_any(const Parameters& params, int32_t first) {
  Bounds any{0, 0};
#pragma unroll 1
  for (int32_t row = first; row < first + kRows; ++row) {
    const Bounds own = visible_keys(params, row);
    if (own.is_empty()) continue;
    any = any.is_empty() ? own : Bounds{min(any.begin, own.begin), max(any.end, own.end)};
  }
  return any;
}

}  // namespace cupymla::indexer_loss_dense
