// How many columns a row may see.
#pragma once

#include "../../common/indexer_score.cuh"
#include "params.cuh"

namespace cupymla::indexer_topk {

__device__ __forceinline__ int32_t limit_of(const Parameters& params, int64_t row) {
  return params.causal == 0 ? params.columns
                            : indexer::causal_end(params.q_start, row, params.k_stride, params.columns);
}

}  // namespace cupymla::indexer_topk
