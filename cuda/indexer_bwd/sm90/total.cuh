// Stage `total`: what all entries together add to a key's row of dk at most; see fixed_point.cuh.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "fixed_point.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

// One CTA to a query: adds the bounds of its entries to the totals of their keys.
__device__ __forceinline__ void total(const Parameters& params) {
  const Query query(params);
  const float query_bound = params.query_bounds[static_cast<int64_t>(query.batch) * params.queries + query.query];
  const double to_units = wide_power_of_two(-total_unit_log2(params.largest[query.batch], params.adds_log2));
  int64_t* totals = params.totals + static_cast<int64_t>(query.batch) * params.keys;
#pragma unroll 4
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
    const int32_t key = query.key_of(entry);
    const float gradient = query.gradients[entry];
    if (key >= 0 && is_finite(gradient)) {
      reduce_add_int64(totals + key, __double2ll_ru(entry_bound(gradient, query_bound) * to_units));
    }
  }
}

}  // namespace cupymla::indexer_bwd
