// The log-sum-exp of a row's selected scores, for what selects index scores.
#pragma once

#include "../../common/math.cuh"
#include "block.cuh"
#include "row.cuh"

namespace cupymla::topk {

struct MaxOf {
  static __device__ __forceinline__ float none() { return negative_infinity(); }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOf {
  static __device__ __forceinline__ float none() { return 0.0f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Combines all threads' values, in an order that is always the same. Synchronised after.
template <typename Combine>
__device__ __forceinline__ float over_block(Storage& storage, const Thread& thread, float own, const Combine& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = combine(own, __shfl_xor_sync(kAllLanes, own, step));
  if (thread.lane == 0) storage.warp_sums[thread.warp] = __float_as_uint(own);
  __syncthreads();
  const bool there = static_cast<uint32_t>(thread.lane) < thread.warps;
  float all = there ? __uint_as_float(storage.warp_sums[thread.lane]) : Combine::none();
  __syncthreads();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all = combine(all, __shfl_xor_sync(kAllLanes, all, step));
  return all;
}

// Of the scores in these columns; +inf where there are none, or one is. Neither -inf nor NaN is ever selected.
__device__ __forceinline__ float selected_lse(Storage& storage, const Thread& thread, const Row& row,
                                              const int32_t* columns, uint32_t count, bool base2) {
  float most = MaxOf::none();
  for (uint32_t i = thread.index; i < count; i += thread.threads) most = fmaxf(most, row.score(columns[i]));
  most = over_block(storage, thread, most, MaxOf());
  float sum = 0.0f;
  for (uint32_t i = thread.index; i < count; i += thread.threads) {
    sum += exp2_approx((row.score(columns[i]) - most) * kLog2e);
  }
  sum = over_block(storage, thread, sum, SumOf());
  if (count == 0 || most == positive_infinity()) return positive_infinity();
  const float log2_sum = log2f(sum);
  return base2 ? fmaf(most, kLog2e, log2_sum) : fmaf(log2_sum, kLn2, most);
}

}  // namespace cupymla::topk
