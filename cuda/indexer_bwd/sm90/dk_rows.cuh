// Stages before and after the gradients: `zero` and `bound` make the workspace ready, `round` makes dk of the sums.
#pragma once

#include "../../common/integer_reduction.cuh"
#include "fixed_point.cuh"
#include "gather.cuh"

namespace cupymla::indexer_bwd {

constexpr int kRowThreads = 256;

__device__ __forceinline__ int64_t first_thread() {
  return static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t all_threads() { return static_cast<int64_t>(gridDim.x) * kRowThreads; }

__device__ __forceinline__ void zero(const Parameters& params) {
  for (int64_t chunk = first_thread(); chunk < params.zeroed_chunks; chunk += all_threads()) {
    reinterpret_cast<uint4*>(params.sums)[chunk] = make_uint4(0, 0, 0, 0);
  }
}

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

// A channel of integer sums, unless infinities were added.
__device__ __forceinline__ float channel_of(long long units, int unit, uint32_t positive, uint32_t negative) {
  if ((positive | negative) == 0) return from_units(units, unit);
  if (negative == 0) return positive_infinity();
  return positive == 0 ? negative_infinity() : __int_as_float(0x7fffffff);
}

// Four channels of a row of sums.
__device__ __forceinline__ float4 four_sums(const Parameters& params, int64_t row, int channel) {
  const int64_t element = row * kD + channel;
  if constexpr (!kDeterministic) return *reinterpret_cast<const float4*>(params.sums + element * 4);
  const longlong2* units = reinterpret_cast<const longlong2*>(params.sums + element * 8);
  const longlong2 low = units[0], high = units[1];
  const int unit = unit_log2(params.bounds[row], params.adds_log2);
  const uint32_t* words = params.non_finite + element / 32 * 2;
  const uint32_t positive = words[0] >> (channel % 32), negative = words[1] >> (channel % 32);
  return make_float4(channel_of(low.x, unit, positive & 1u, negative & 1u),
                     channel_of(low.y, unit, positive & 2u, negative & 2u),
                     channel_of(high.x, unit, positive & 4u, negative & 4u),
                     channel_of(high.y, unit, positive & 8u, negative & 8u));
}

__device__ __forceinline__ void round(const Parameters& params) {
  const int64_t chunks = static_cast<int64_t>(params.batch) * params.keys * (kD / 4);
  for (int64_t chunk = first_thread(); chunk < chunks; chunk += all_threads()) {
    const int64_t row = chunk / (kD / 4);
    const int channel = static_cast<int>(chunk % (kD / 4)) * 4;
    const float4 four = four_sums(params, row, channel);
    const int64_t place = row / params.keys * params.dk_batch + row % params.keys * params.dk_key + channel;
    uint8_t* to = params.dk + place * (params.dk_type == 2 ? 4 : 2);
    if (params.dk_type == 2) {
      *reinterpret_cast<float4*>(to) = four;
    } else if (params.dk_type == 1) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__half>(four.x, four.y), pack_pair<__half>(four.z, four.w));
    } else {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__nv_bfloat16>(four.x, four.y), pack_pair<__nv_bfloat16>(four.z, four.w));
    }
  }
}

}  // namespace cupymla::indexer_bwd
