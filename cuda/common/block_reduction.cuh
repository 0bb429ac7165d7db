// Values of all threads of a CTA combined, always in the same order.
#pragma once

#include "types.cuh"

namespace cupymla {

struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ __forceinline__ double operator()(double a, double b) const { return fmax(a, b); }
};

struct Plus {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Of all warps, which `shared.per_warp` has a place each for. Synchronised before and after.
template <typename Shared, typename Value, typename Combine>
__device__ __forceinline__ auto over_block(Shared& shared, Value value, Combine combine) {
  constexpr int kWarps = sizeof(shared.per_warp) / sizeof(shared.per_warp[0]);
  using T = decltype(combine(shared.per_warp[0], shared.per_warp[0]));
  T own = value;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = combine(own, __shfl_xor_sync(0xffffffffu, own, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.per_warp[threadIdx.x / 32] = own;
  __syncthreads();
  T all = shared.per_warp[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) all = combine(all, shared.per_warp[warp]);
  return all;
}

}  // namespace cupymla
