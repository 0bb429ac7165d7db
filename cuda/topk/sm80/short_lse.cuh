// The log-sum-exp of a short row's selected scores, out of registers.
#pragma once

#include "lse.cuh"
#include "short_row.cuh"

namespace cupymla::topk {

// Combines all threads' values, in an order that is always the same.
template <typename Combine>
__device__ __forceinline__ float over_short_block(const Thread& thread, float* of_warps, float own,
                                                  const Combine& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = combine(own, __shfl_xor_sync(kAllLanes, own, step));
  if (thread.lane == 0) of_warps[thread.warp] = own;
  __syncthreads();
  float all = static_cast<uint32_t>(thread.lane) < thread.warps ? of_warps[thread.lane] : Combine::none();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all = combine(all, __shfl_xor_sync(kAllLanes, all, step));
  return all;
}

// To be called behind `select_short`, whose memory it takes but for `last_sums`; +inf where nothing is selected, or
// +inf is.
__device__ __forceinline__ float short_lse(ShortStorage& storage, const Thread& thread, const OwnScores& scores,
                                           const ShortSelection& selection, bool base2) {
  float most = MaxOf::none();
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) {
    if (selection.own >> i & 1u) most = fmaxf(most, scores[i]);
  }
  most = over_short_block(thread, reinterpret_cast<float*>(storage.extrema), most, MaxOf());
  float sum = 0.0f;
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) {
    if (selection.own >> i & 1u) sum += exp2_approx((scores[i] - most) * kLog2e);
  }
  sum = over_short_block(thread, reinterpret_cast<float*>(storage.warp_sums), sum, SumOf());
  if (selection.count == 0 || most == positive_infinity()) return positive_infinity();
  const float log2_sum = log2f(sum);
  return base2 ? fmaf(most, kLog2e, log2_sum) : fmaf(log2_sum, kLn2, most);
}

}  // namespace cupymla::topk
