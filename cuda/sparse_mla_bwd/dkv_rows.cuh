// Stages `zero` and `round`: the fp32 sums of dKV (and the distribution) before anything is added to them, and dKV from
// them after everything is.
#pragma once

#include "../common/math.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kRowThreads = 256;

// A warp to a row, grid-wide.
__device__ __forceinline__ int64_t first_row() {
  return static_cast<int64_t>(blockIdx.x) * (kRowThreads / 32) + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t row_stride() { return static_cast<int64_t>(gridDim.x) * (kRowThreads / 32); }

template <int kDQk>
__device__ __forceinline__ void zero(const Parameters& params) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < params.kv_rows; row += row_stride()) {
    float* start = params.sums + row / params.s_kv * params.sums_batch + row % params.s_kv * params.sums_token;
    for (int column = lane * 4; column < kDQk; column += 128) {
      *reinterpret_cast<float4*>(start + column) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  if (params.attn_dist == nullptr) return;
  for (int64_t row = first_row(); row < params.query_end; row += row_stride()) {
    float* start = params.attn_dist + row / params.s_q * params.attn_dist_batch +
                   row % params.s_q * params.attn_dist_query;
    for (int32_t slot = lane; slot < params.topk; slot += 32) start[slot] = 0.f;
  }
}

template <int kDQk, typename Element>
__device__ __forceinline__ void round(const Parameters& params) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < params.kv_rows; row += row_stride()) {
    const int64_t batch = row / params.s_kv, token = row % params.s_kv;
    const float4* from =
        reinterpret_cast<const float4*>(params.sums + batch * params.sums_batch + token * params.sums_token);
    uint8_t* to = params.dkv + batch * params.dkv_batch_bytes + token * params.dkv_token_bytes;
    for (int chunk = lane; chunk < kDQk / 8; chunk += 32) {
      const float4 left = from[2 * chunk], right = from[2 * chunk + 1];
      reinterpret_cast<uint4*>(to)[chunk] =
          make_uint4(pack_pair<Element>(left.x, left.y), pack_pair<Element>(left.z, left.w),
                     pack_pair<Element>(right.x, right.y), pack_pair<Element>(right.z, right.w));
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
