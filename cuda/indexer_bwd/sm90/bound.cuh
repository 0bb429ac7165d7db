// Stages `bound` and `total`: what entries add to rows of dk at most; see fixed_point.cuh.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "channels.cuh"
#include "fixed_point.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

constexpr int kHeadLanes = kThreads / kRowChunks;  // heads that the CTA looks at together

struct BoundStorage {
  float weights[128];
  float sums[kHeadLanes][kD];
  float per_warp[kThreads / 32];
};

// One CTA to a query: its bound, negative where its entries may add what is not finite, the parts of its channels, and
// the largest of its entries.
__device__ __forceinline__ void bound(const Parameters& params) {
  __shared__ BoundStorage shared;
  const Query query(params);
  float steepest = -1.0f;
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
    const float gradient = query.key_of(entry) >= 0 ? fabsf(query.gradients[entry]) : -1.0f;
    if (is_finite(gradient)) steepest = fmaxf(steepest, gradient);
  }
  bool finite = true;
  float weight = 0.0f;
  for (int head = threadIdx.x; head < params.heads; head += kThreads) {
    weight = fabsf(weight_of(params, query, head));
    finite &= is_finite(weight);
    if (!is_finite(weight)) weight = 0.0f;
    shared.weights[head] = weight;
  }
  // fp16 operands are rounded to 2^-38 of the largest.
  const float rounding = CUPYMLA_FP16 != 0 ? over_block(shared, weight, Larger{}) * 0x1p-37f : 0.0f;
  __syncthreads();

  const int part = static_cast<int>(threadIdx.x) % kRowChunks;
  const Element* rows = params.q + query.batch * params.q_batch + query.query * params.q_query;
  float sums[8] = {};
#pragma unroll 4
  for (int head = threadIdx.x / kRowChunks; head < params.heads; head += kHeadLanes) {
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(rows + head * params.q_head + part * 8));
    const Element* values = reinterpret_cast<const Element*>(&eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = fabsf(static_cast<float>(values[i]));
      finite &= is_finite(value);
      if (is_finite(value)) sums[i] = fmaf(shared.weights[head] + rounding, value, sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) shared.sums[threadIdx.x / kRowChunks][part * 8 + i] = sums[i];
  finite = __syncthreads_and(static_cast<int>(finite)) != 0;
  const int channel = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  if (channel < kD) {
#pragma unroll
    for (int lane = 0; lane < kHeadLanes; ++lane) sum += shared.sums[lane][channel];
    sum = fminf(sum + 0x1p-126f, kLargestFloat);  // products below normal floats are lost
  }
  const float largest = over_block(shared, sum, Larger{});
  steepest = over_block(shared, steepest, Larger{});
  if (channel == 0) {
    params.query_bounds[static_cast<int64_t>(query.batch) * params.queries + query.query] =
        finite && largest < kSafe ? largest : -largest;
  }
  if (steepest < 0.0f) return;  // it adds nothing that is finite
  if (channel == 0) {
    const double most = fmin(entry_bound(steepest, largest), static_cast<double>(kLargestFloat));
    reduce_max_positive(params.largest + query.batch, static_cast<float>(most));
  }
  if (channel < kD) {
    reduce_max_positive(params.channel_parts + static_cast<int64_t>(query.batch) * kD + channel, sum / largest);
  }
}

// One CTA to a query: adds the bounds of its entries to the totals of their keys.
__device__ __forceinline__ void total(const Parameters& params) {
  const Query query(params);
  const float query_bound = params.query_bounds[static_cast<int64_t>(query.batch) * params.queries + query.query];
  const double to_units = wide_power_of_two(-total_unit_log2(params.largest[query.batch], params.adds_log2));
  uint64_t* totals = params.totals + static_cast<int64_t>(query.batch) * params.keys;
#pragma unroll 4
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
    const int32_t key = query.key_of(entry);
    if (key < 0) continue;
    const float gradient = query.gradients[entry];
    if (!is_finite(gradient)) continue;
    reduce_add_uint64(totals + key, __double2ull_ru(entry_bound(gradient, query_bound) * to_units));
  }
}

}  // namespace cupymla::indexer_bwd
