// Stage `bound`: what a query's entries add to rows of dk at most; see fixed_point.cuh.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "channels.cuh"
#include "fixed_point.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

constexpr int kHeadLanes = kThreads / kRowChunks;  // heads that the CTA looks at together

struct BoundStorage {
  float weights[kThreads];  // at most as many heads
  float sums[kHeadLanes][kD];
  float per_warp[kThreads / 32];
};

// One CTA to a query: its bound, negative where its entries may add what is not finite, the parts of its channels, and
// the largest of its entries.
__device__ __forceinline__ void bound(const Parameters& params) {
  __shared__ BoundStorage shared;
  const Query query(params);
  float steepest = -1.0f;
#pragma unroll 4
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kThreads) {
    const float gradient = fabsf(query.gradients[entry]);
    if (query.key_of(entry) >= 0 && is_finite(gradient)) steepest = fmaxf(steepest, gradient);
  }
  bool finite = true;
  float weight = 0.0f;
  if (threadIdx.x < params.heads) {
    weight = fabsf(weight_of(params, query, threadIdx.x));
    // As an operand: above the largest bf16 it is an infinity. fp16 operands are scaled.
    finite = is_finite(CUPYMLA_FP16 != 0 ? weight : static_cast<float>(static_cast<Element>(weight)));
    if (!finite) weight = 0.0f;
    shared.weights[threadIdx.x] = weight;
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

}  // namespace cupymla::indexer_bwd
