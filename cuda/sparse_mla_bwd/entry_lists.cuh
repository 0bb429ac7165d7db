// Stages `clear`, `count`, `scan` and `place`: for each token, which entries of the queries name it. A counting sort:
// `row_ends` holds first how many entries name a token, then where its part of `entry_list` begins, then where it ends.
// The order inside a part is left to chance here; `sum_rows` puts it right.
#pragma once

#include "../common/sparse_query.cuh"
#include "../common/warp.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kListThreads = 256;
constexpr int kScanThreads = 1024;

// Of which chunk of queries a CTA of these stages makes lists, where they are made for several at once: chunks lie on
// grid.y, and a chunk's queries on grid.x of `count` and `place`.
template <bool kChunks>
struct ListedChunk {
  static __device__ __forceinline__ uint32_t number() { return kChunks ? blockIdx.y : 0; }

  static __device__ __forceinline__ int32_t* row_ends(const Parameters& params) {
    return params.row_ends + static_cast<int64_t>(number()) * params.kv_rows;
  }

  // Entries of a chunk, valid or not: the room in its part of `entry_list`.
  static __device__ __forceinline__ int32_t entries(const Parameters& params);

  static __device__ __forceinline__ int32_t* entry_list(const Parameters& params) {
    return params.entry_list + static_cast<int64_t>(number()) * entries(params);
  }

  static __device__ __forceinline__ uint32_t query(const Parameters& params) {
    return params.query_begin + number() * gridDim.x + blockIdx.x;
  }
};

// Entries of the launch's queries, valid or not: the room in `entry_list`.
__device__ __forceinline__ int32_t all_entries(const Parameters& params) {
  return static_cast<int32_t>(params.query_end - params.query_begin) * params.topk;
}

template <bool kChunks>
__device__ __forceinline__ int32_t ListedChunk<kChunks>::entries(const Parameters& params) {
  return kChunks ? static_cast<int32_t>(gridDim.x) * params.topk : all_entries(params);
}

// Calls `take(row, entry)` for each valid entry of one query per CTA: the token's row among all batch entries, and the
// entry's number among the chunk's.
template <bool kChunks, typename Take>
__device__ __forceinline__ void for_each_entry(const Parameters& params, Take take) {
  const uint32_t token = ListedChunk<kChunks>::query(params);
  if (token >= params.query_end) return;
  const SparseQuery<64> query(params, token);
  const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
  for (int32_t entry = threadIdx.x; entry < query.entries; entry += kListThreads) {
    const int32_t named = __ldg(indices + entry);
    if (static_cast<uint32_t>(named) >= query.token_limit) continue;
    take(static_cast<int64_t>(query.batch) * params.s_kv + named,
         static_cast<int32_t>(blockIdx.x) * params.topk + entry);
  }
}

template <bool kChunks>
__device__ __forceinline__ void count_entries(const Parameters& params) {
  int32_t* counts = ListedChunk<kChunks>::row_ends(params);
  for_each_entry<kChunks>(params, [&](int64_t row, int32_t) { atomicAdd(counts + row, 1); });
}

template <bool kChunks>
__device__ __forceinline__ void place_entries(const Parameters& params) {
  int32_t* ends = ListedChunk<kChunks>::row_ends(params);
  for_each_entry<kChunks>(params, [&](int64_t row, int32_t entry) {
    const int32_t place = atomicAdd(ends + row, 1);
    // Another kernel may have changed the indices since they were counted: then sums are wrong, but nothing else.
    if (place < ListedChunk<kChunks>::entries(params)) ListedChunk<kChunks>::entry_list(params)[place] = entry;
  });
}

template <bool kChunks>
__device__ __forceinline__ void clear_counts(const Parameters& params) {
  int32_t* counts = ListedChunk<kChunks>::row_ends(params);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kListThreads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x; row < params.kv_rows;
       row += stride) {
    counts[row] = 0;
  }
}

// Exclusive sums of row_ends in place, by one CTA.
template <bool kChunks>
__device__ __forceinline__ void scan_rows(const Parameters& params) {
  int32_t* ends = ListedChunk<kChunks>::row_ends(params);
  __shared__ int32_t warp_sums[kScanThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kOwn = 4;  // rows of a thread at a time
  int32_t before = 0;      // sum of all rows already done
  for (int64_t first = 0; first < params.kv_rows; first += kScanThreads * kOwn) {
    const int64_t row = first + threadIdx.x * kOwn;
    int32_t counts[kOwn], own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      counts[i] = row + i < params.kv_rows ? ends[row + i] : 0;
      own += counts[i];
    }
    const int32_t inclusive = static_cast<int32_t>(warp_scan(static_cast<uint32_t>(own), lane));
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int32_t start = before + inclusive - own;
    for (int other = 0; other < kScanThreads / 32; ++other) {
      if (other < warp) start += warp_sums[other];
      before += warp_sums[other];
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (row + i < params.kv_rows) ends[row + i] = start;
      start += counts[i];
    }
    __syncthreads();
  }
}

}  // namespace cupymla::sparse_mla_bwd
