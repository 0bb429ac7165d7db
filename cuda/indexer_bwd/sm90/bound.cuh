// Stage `bound`: the largest of what any entry adds to a key's row of dk.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "channels.cuh"
#include "fixed_point.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

// One CTA to a query: raises the bounds of its keys. What is not finite is left out: what is added of it is not finite
// either, and has its own bits.
__device__ __forceinline__ void bound(const Parameters& params) {
  __shared__ struct {
    float per_warp[kThreads / 32];
  } shared;
  const Query query(params);
  const Element* rows = params.q + query.batch * params.q_batch + query.query * params.q_query;
  float largest = 0.0f, weights = 0.0f;
  for (int chunk = threadIdx.x; chunk < params.heads * kRowChunks; chunk += kThreads) {
    const Element* source = rows + chunk / kRowChunks * params.q_head + chunk % kRowChunks * 8;
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(source));
    const Element* values = reinterpret_cast<const Element*>(&eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = fabsf(static_cast<float>(values[i]));
      if (is_finite(value)) largest = fmaxf(largest, value);
    }
  }
  for (int head = threadIdx.x; head < params.heads; head += kThreads) {
    const float weight = fabsf(weight_of(params, query, head));
    if (is_finite(weight)) weights += weight;
  }
  largest = over_block(shared, largest, Larger{});
  weights = over_block(shared, weights, Plus{});
  // Products in the order in which terms are made, or a small gradient would make a bound of 0; capped, or one of
  // 0 would make NaN.
  const float most = fminf(fminf(weights, kLargestFloat) * largest, kLargestFloat);
  float* bounds = params.bounds + static_cast<int64_t>(query.batch) * params.keys;
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
    const int32_t key = query.key_of(entry);
    if (key < 0) continue;
    const float gradient = fabsf(query.gradients[entry]);
    if (is_finite(gradient)) reduce_max_positive(bounds + key, fminf(gradient * most, kLargestFloat));
  }
}

}  // namespace cupymla::indexer_bwd
