// In which order of columns sums of dKV are kept on Hopper, the rows behind them, and dKV from them.
#pragma once

#include "../dkv_rows.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// Sums, and stored rows of floats, have their columns in the order of threads: of sixteen columns a thread of a quad
// has two neighbours of either eight, and these four are kept side by side: neighbours need not exchange them first.
//
//   column  0 1 2 3 4 5 6 7  8 9 10 11 12 13 14 15
//   place   0 1 4 5 8 9 12 13  2 3 6 7 10 11 14 15
constexpr int kColumnRun = 16;

// To which rows sums of entries that are not valid are added, behind all others: a condition around each reduction
// would cost more than the reduction, and none can stand between products. Nobody reads them.
constexpr int kSpareRows = 64;

// What stage `zero` has besides: what is added to them is read.
template <int kDQk>
__device__ __forceinline__ void zero_spare_rows(const Parameters& params) {
  if (blockIdx.x != 0) return;
  float4* start = reinterpret_cast<float4*>(params.sums + params.kv_rows * kDQk);
  for (int i = threadIdx.x; i < kSpareRows * kDQk / 4; i += kRowThreads) start[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// Stage `round` of sums in that order.
template <int kDQk, typename Element>
__device__ __forceinline__ void round_runs(const Parameters& params) {
  round_rows<kDQk, Element>(params, [](const float* from, int chunk, float2 (&pairs)[4]) {
    const float2* run = reinterpret_cast<const float2*>(from) + chunk / 2 * (kColumnRun / 2) + chunk % 2;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) pairs[pair] = run[2 * pair];
  });
}

}  // namespace cupymla::sparse_mla_bwd
