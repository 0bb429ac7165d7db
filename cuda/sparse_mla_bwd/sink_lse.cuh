// Stage `sink_lse`, ahead of the attention where the distribution counts the sink. It makes the sink one more key: the
// attention takes the lse with the sink for its lse, and knows of no sink, so that its P is also the distribution's.
// What each query adds to d_sink is made here, for which delta is computed once more.
//
// A CTA takes a query, a warp every eighth of its heads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/grid_dependency.cuh"
#include "sink.cuh"

namespace cupymla::sparse_mla_bwd {

// Python mirrors it as `SinkLseParameters` in cupymla/ops/sparse_mla_bwd/cuda.py.
struct SinkLseParameters {
  Parameters common;
  const uint8_t* dout;  // [batch, s_q, h_q, 512] 16-bit elements
  float* sink_lse;      // workspace [batch * s_q, h_q]
  int64_t dout_batch_bytes, dout_query_bytes, dout_head_bytes;
  int32_t is_fp16;      // 0: bf16
};

constexpr unsigned kSinkLseThreads = 256;
constexpr int kSinkLseChunks = 512 / 8;  // of eight channels

// log(exp(lse) + exp(sink)), in the base that lse is in.
__device__ __forceinline__ float lse_with_sink(const Parameters& params, int32_t head, float lse) {
  const float excess = sink_excess(params, head, lse);
  const float sink = params.attn_sink[head * params.attn_sink_head] * params.sink_to_lse;
  // Equal infinities, whose sum is the answer, or a NaN.
  if (excess != excess) return lse + sink;
  return fmaxf(lse, sink) + log1pf(accurate_exp2(-fabsf(excess))) * params.sink_to_lse;
}

template <typename Element>
__device__ __forceinline__ float warp_delta(const uint8_t* out, const uint8_t* dout, int lane) {
  float delta = 0.f;
#pragma unroll
  for (int chunk = lane; chunk < kSinkLseChunks; chunk += 32) {
    delta += dot_eight<Element>(__ldg(reinterpret_cast<const uint4*>(out) + chunk),
                                __ldg(reinterpret_cast<const uint4*>(dout) + chunk));
  }
  delta = quad_sum(delta);
#pragma unroll
  for (int apart = 4; apart < 32; apart *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, apart);
  return delta;
}

// Whether any entry of the query is valid.
__device__ __forceinline__ bool is_occupied(const Parameters& params, const SparseQuery<64>& query) {
  const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
  bool found = false;
  for (int32_t entry = threadIdx.x; entry < query.entries && !found; entry += kSinkLseThreads) {
    found = static_cast<uint32_t>(indices[entry]) < query.token_limit;
  }
  return __syncthreads_or(static_cast<int>(found)) != 0;
}

__device__ __forceinline__ void make_sink_lse(const SinkLseParameters& params) {
  const Parameters& common = params.common;
  wait_for_primary_grid(common.has_dependent != 0);
  const uint32_t token = common.query_begin + blockIdx.x;
  // Threads need not agree on topk_length, whoever writes to it: what they find is put together.
  const SparseQuery<64> query(common, token);
  const bool occupied = is_occupied(common, query);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t batch = query.batch, row = query.query;
  const uint8_t* out = common.out + batch * common.out_batch_bytes + row * common.out_query_bytes;
  const uint8_t* dout = params.dout + batch * params.dout_batch_bytes + row * params.dout_query_bytes;
#pragma unroll 1
  for (int32_t head = static_cast<int32_t>(threadIdx.x / 32); head < common.h_q; head += kSinkLseThreads / 32) {
    const uint8_t* own_out = out + head * common.out_head_bytes;
    const uint8_t* own_dout = dout + head * params.dout_head_bytes;
    const float delta = params.is_fp16 != 0 ? warp_delta<__half>(own_out, own_dout, lane)
                                            : warp_delta<__nv_bfloat16>(own_out, own_dout, lane);
    if (lane != 0) continue;
    store_sink_term(common, query, head, occupied, delta);
    const int64_t place = static_cast<int64_t>(token) * static_cast<uint32_t>(common.h_q) + head;
    params.sink_lse[place] = lse_with_sink(common, head, read_lse(common, query, head));
  }
}

}  // namespace cupymla::sparse_mla_bwd
