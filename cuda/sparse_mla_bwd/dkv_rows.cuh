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
    for (int32_t entry = lane; entry < params.topk; entry += 32) start[entry] = 0.f;
  }
}

__device__ __forceinline__ void store_eight(uint8_t* to, int chunk, const float2 (&pairs)[4], float) {
  float4* line = reinterpret_cast<float4*>(to) + 2 * chunk;
  line[0] = make_float4(pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y);
  line[1] = make_float4(pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y);
}

template <typename Element>
__device__ __forceinline__ void store_eight(uint8_t* to, int chunk, const float2 (&pairs)[4], Element) {
  reinterpret_cast<uint4*>(to)[chunk] =
      make_uint4(pack_pair<Element>(pairs[0].x, pairs[0].y), pack_pair<Element>(pairs[1].x, pairs[1].y),
                 pack_pair<Element>(pairs[2].x, pairs[2].y), pack_pair<Element>(pairs[3].x, pairs[3].y));
}

// Rows of dKV, eight columns to a lane at a time. Element: dkv's, also float. `read` brings the sums of eight columns:
// in which order sums are kept is its affair.
template <int kDQk, typename Element, typename Read>
__device__ __forceinline__ void round_rows(const Parameters& params, Read read) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < params.kv_rows; row += row_stride()) {
    const int64_t batch = row / params.s_kv, token = row % params.s_kv;
    const float* from = params.sums + batch * params.sums_batch + token * params.sums_token;
    uint8_t* to = params.dkv + batch * params.dkv_batch_bytes + token * params.dkv_token_bytes;
    for (int chunk = lane; chunk < kDQk / 8; chunk += 32) {
      float2 pairs[4];
      read(from, chunk, pairs);
      store_eight(to, chunk, pairs, Element{});
    }
  }
}

template <int kDQk, typename Element>
__device__ __forceinline__ void round(const Parameters& params) {
  round_rows<kDQk, Element>(params, [](const float* from, int chunk, float2 (&pairs)[4]) {
    const float4* columns = reinterpret_cast<const float4*>(from) + 2 * chunk;
    const float4 left = columns[0], right = columns[1];
    pairs[0] = make_float2(left.x, left.y);
    pairs[1] = make_float2(left.z, left.w);
    pairs[2] = make_float2(right.x, right.y);
    pairs[3] = make_float2(right.z, right.w);
  });
}

}  // namespace cupymla::sparse_mla_bwd
