// Stage `sum` where rows are packed.
#pragma once

#include "packed_columns.cuh"
#include "sum_rows.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kPackedSumThreads = 96;  // at least one for every eight channels

// What a thread has of a token's sum, which has its columns in runs (sm90/runs.cuh). Of a vector of the first
// kSplitColumns columns either half lies in one of two neighbouring runs, of others all in one: `PackedRowTargets` in
// sm90/cluster_rows.cuh says why.
template <int kDQk, int kSplitColumns = 512>
struct PackedSum {
  enum : int { kThreads = kPackedSumThreads };
  enum : bool { kClearsList = true };
  static constexpr int kVectors = kDQk / kPackedColumns;  // of a row, one to a thread
  static constexpr int kAtOnce = 6;                       // rows under way
  static constexpr int kSplitVectors = kSplitColumns / kPackedColumns;
  static_assert(kThreads >= kVectors);

  const bool takes_part = threadIdx.x < kVectors;
  // Threads behind the last vector take it as well, and leave it.
  const int vector = min(static_cast<int>(threadIdx.x), kVectors - 1);
  float sums[kPackedColumns] = {};

  // What is listed of an entry: its row's first vector. Lists that another kernel has spoilt may name any entry.
  static __device__ __forceinline__ int32_t listed(int32_t entry, int32_t entries) {
    return static_cast<uint32_t>(entry) < static_cast<uint32_t>(entries) ? entry * kVectors : 0;
  }

  __device__ __forceinline__ uint4 load(const Parameters& params, int32_t first_vector) const {
    return reinterpret_cast<const uint4*>(params.partials)[first_vector + vector];
  }

  __device__ __forceinline__ void add(const Parameters& params, int32_t, int32_t first_vector) {
    add_packed_columns(sums, load(params, first_vector));
  }

  __device__ __forceinline__ void add_list(const Parameters& params, int32_t entries, const int32_t* list,
                                           int32_t count) {
#pragma unroll 1
    for (int32_t i = 0; i < count; i += kAtOnce) {
      uint4 rows[kAtOnce];
      uint32_t others = 0;  // that are not finite
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        rows[k] = make_uint4(kPackedZeros, kPackedZeros, kPackedZeros, kPackedZeros);
        if (i + k < count) rows[k] = load(params, list[i + k]);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) others |= packed_is_finite(rows[k]) ? 0u : 1u;
      // One branch for all of them, behind all loads.
      if (others == 0) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) add_finite_columns(sums, rows[k]);
      } else {
#pragma unroll 1
        for (int k = i; k < min(i + kAtOnce, count); ++k) add(params, entries, list[k]);
      }
    }
  }

  __device__ __forceinline__ void add_to(float* start) const {
    const bool is_split = vector < kSplitVectors;
    float4* total = reinterpret_cast<float4*>(start) + (is_split ? vector / 4 * 8 + vector % 4 : vector * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* here = total + half * (is_split ? 4 : 1);
      const float* sum = sums + 4 * half;
      *here = plus(*here, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
};

template <int kDQk>
__device__ __forceinline__ void sum_packed_rows(const Parameters& params) {
  __shared__ int32_t words[SumRows<PackedSum<kDQk>>::kSorted];
  SumRows<PackedSum<kDQk>>{params, words}.run(blockIdx.x);
}

}  // namespace cupymla::sparse_mla_bwd
