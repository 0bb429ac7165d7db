// The third warpgroup: delta, the sum of out * dout over the channels of a head.
#pragma once

#include "../../common/math.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

// Eight lanes to a head, each with every eighth 16 bytes of its row; a warp has 16 heads.
template <typename Config, typename Element>
__device__ __forceinline__ void store_delta(const Work<Config>& work, const Parameters& params) {
  constexpr int kRowLanes = 8, kPasses = Config::kHeads / 4 / (32 / kRowLanes);
  constexpr int kChunks = Config::kDV / 8 / kRowLanes;
  const int warp = (threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
  work.for_each_query(params, [&](const Query<Config>& query) {
    const int64_t batch = query.batch, token = query.query;
    const uint8_t* out = params.out + batch * params.out_batch_bytes + token * params.out_query_bytes;
    const uint8_t* dout = params.dout + batch * params.dout_batch_bytes + token * params.dout_query_bytes;
    float* delta = params.delta + batch * params.delta_batch + token * params.delta_query;
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t head = work.first_head + (warp * kPasses + pass) * (32 / kRowLanes) + lane / kRowLanes;
      float sum = 0.f;
      if (head < params.h_q) {
        const uint4* left = reinterpret_cast<const uint4*>(out + head * params.out_head_bytes) + lane % kRowLanes;
        const uint4* right = reinterpret_cast<const uint4*>(dout + head * params.dout_head_bytes) + lane % kRowLanes;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          sum += dot_eight<Element>(__ldcs(left + i * kRowLanes), __ldcs(right + i * kRowLanes));
        }
      }
#pragma unroll
      for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      if (lane % kRowLanes == 0 && head < params.h_q) delta[head * params.delta_head] = sum;
    }
  });
}

}  // namespace cupymla::sparse_mla_bwd_phase1
