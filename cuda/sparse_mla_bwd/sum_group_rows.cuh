// Stage `sum` of rows that one CTA of the attention has packed: by lists of entries, and of packed queries by their own
// lists, which are in the order of tokens. Then every row of a token is found without a list of entries.
#pragma once

#include "group_words.cuh"
#include "sum_packed_rows.cuh"

namespace cupymla::sparse_mla_bwd {

// A token's sum where packed rows are as `PackedEntryTargets` has them (sm90/packed_entry_targets.cuh).
template <int kDQk>
using PackedEntrySum = PackedSum<kDQk, kDQk>;

template <int kDQk>
__device__ __forceinline__ void sum_packed_entries(const Parameters& params) {
  __shared__ int32_t words[SumRows<PackedEntrySum<kDQk>>::kSorted];
  SumRows<PackedEntrySum<kDQk>>{params, words}.run(blockIdx.x);
}

// What the launch's query groups add to a token, one CTA to each.
template <int kDQk, int kQueries>
struct SumGroupRows {
  static constexpr int kThreads = kPackedSumThreads;
  static constexpr int kWarps = kThreads / 32;

  struct Storage {
    int32_t listed[kThreads];  // first vectors of rows, in the order of query groups
    uint32_t found[kWarps];    // how many of them a warp has, and kHasRepeated
  };

  const Parameters& params;
  Storage& storage;
  PackedEntrySum<kDQk> sum = {};

  __device__ __forceinline__ int32_t entries() const {
    return static_cast<int32_t>(params.query_end - params.query_begin) * stored_rows<kQueries>(params);
  }

  __device__ __forceinline__ int32_t first_vector(uint32_t place, uint32_t row_entry) const {
    const int32_t row = static_cast<int32_t>(place) * stored_rows<kQueries>(params) + static_cast<int32_t>(row_entry);
    return PackedEntrySum<kDQk>::listed(row, entries());
  }

  // Further rows of a token of a query group, found by halving.
  __device__ __forceinline__ void add_repeated(uint32_t place, uint32_t token) {
    const GroupWord last = group_words(params, place)[(params.s_kv - 1) / 32];
    const int32_t* const list =
        params.rows + QueryGroup<kQueries>::first_row_entry(params, place);
    const uint32_t end = static_cast<uint32_t>(rows_of(params.row_counts[place]));
    uint32_t low = (last.before & ~kHasRepeated) + __popc(last.tokens), high = end;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (static_cast<uint32_t>(token_of(list[middle])) < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    for (; low < end && static_cast<uint32_t>(token_of(list[low])) == token; ++low) {
      sum.add(params, entries(), first_vector(place, low));
    }
  }

  __device__ __forceinline__ void run(int64_t row) {
    const uint32_t batch = static_cast<uint32_t>(row / params.s_kv), token = static_cast<uint32_t>(row % params.s_kv);
    const uint32_t bit = 1u << token % 32;
    const uint32_t query_groups = (static_cast<uint32_t>(params.s_q) - 1) / kQueries + 1;  // of a batch entry
    const uint32_t begin = max(params.query_begin, batch * query_groups);
    const uint32_t end = min(params.query_end, (batch + 1) * query_groups);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t rows = 0;
    for (uint32_t first = begin; first < end; first += kThreads) {
      const uint32_t place = first - params.query_begin + threadIdx.x;
      GroupWord word = {0, 0};
      if (first + threadIdx.x < end) word = group_words(params, place)[token / 32];
      const bool is_named = (word.tokens & bit) != 0;
      const uint32_t named = __ballot_sync(0xffffffffu, is_named);
      const bool repeats = __any_sync(0xffffffffu, is_named && (word.before & kHasRepeated) != 0);
      if (lane == 0) storage.found[warp] = static_cast<uint32_t>(__popc(named)) | (repeats ? kHasRepeated : 0u);
      __syncthreads();
      uint32_t count = 0, before = 0, flags = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        const uint32_t found = storage.found[other];
        if (other < warp) before += found & ~kHasRepeated;
        count += found & ~kHasRepeated;
        flags |= found;
      }
      if (is_named) {
        const uint32_t row_entry = (word.before & ~kHasRepeated) + __popc(word.tokens & (bit - 1));
        storage.listed[before + __popc(named & ((1u << lane) - 1))] = first_vector(place, row_entry);
      }
      __syncthreads();
      sum.add_list(params, entries(), storage.listed, static_cast<int32_t>(count));
      rows += count;
      if ((flags & kHasRepeated) != 0) {
        for (uint32_t group = first; group < min(first + kThreads, end); ++group) {
          const GroupWord its = group_words(params, group - params.query_begin)[token / 32];
          if ((its.tokens & bit) != 0 && (its.before & kHasRepeated) != 0) {
            add_repeated(group - params.query_begin, token);
          }
        }
      }
      __syncthreads();
    }
    if (rows == 0 || !sum.takes_part) return;
    sum.add_to(params.sums + batch * params.sums_batch + token * params.sums_token);
  }
};

template <int kDQk, int kQueries>
__device__ __forceinline__ void sum_group_rows(const Parameters& params) {
  __shared__ typename SumGroupRows<kDQk, kQueries>::Storage storage;
  SumGroupRows<kDQk, kQueries>{params, storage}.run(blockIdx.x);
}

}  // namespace cupymla::sparse_mla_bwd
