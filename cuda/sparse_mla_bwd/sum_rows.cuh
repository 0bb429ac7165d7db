// Stage `sum`: what the entries of this launch's queries add to each token, in the order of the entries, so that the
// sums have the same bits on every run. One CTA to a token. Entries come from the stage `list`, or from the caller's
// lists, which have those of all queries.
#pragma once

#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kSumThreads = 160;  // at least one for every four channels

// Entries of the launch's queries, valid or not: the room in `entry_list`.
__device__ __forceinline__ int32_t all_entries(const Parameters& params) {
  return static_cast<int32_t>(params.query_end - params.query_begin) * params.topk;
}

__device__ __forceinline__ float4 plus(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What a thread has of a token's sum where rows are stored in float32, in the order of columns that sums have.
template <int kDQk>
struct PlainSum {
  enum : int { kThreads = kSumThreads };
  enum : bool { kClearsList = false };  // whether what is listed is used as it is, so has to be something
  static_assert(kThreads * 4 >= kDQk);

  const bool takes_part = threadIdx.x < kDQk / 4;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);

  // What is listed of an entry.
  static __device__ __forceinline__ int32_t listed(int32_t entry, int32_t) { return entry; }

  __device__ __forceinline__ void add(const Parameters& params, int32_t entries, int32_t entry) {
    if (!takes_part || static_cast<uint32_t>(entry) >= static_cast<uint32_t>(entries)) return;
    const float* row = params.partials + static_cast<int64_t>(entry) * kDQk;
    const float4 value = reinterpret_cast<const float4*>(row)[threadIdx.x];
    sum = plus(sum, value);
  }

  __device__ __forceinline__ void add_list(const Parameters& params, int32_t entries, const int32_t* list,
                                           int32_t count) {
#pragma unroll 4
    for (int32_t i = 0; i < count; ++i) add(params, entries, list[i]);
  }

  __device__ __forceinline__ void add_to(float* start) const {
    float4* total = reinterpret_cast<float4*>(start) + threadIdx.x;
    *total = plus(*total, sum);
  }
};

// A token's entries in the caller's lists: of all queries, in order, as numbers within a batch entry. What lists hold
// can be anything.
struct GivenList {
  const int32_t* list;
  int32_t count;

  // Two threads read where the list begins and ends, and tell the others: these wait for each other, so all must have
  // one answer, whoever writes to lists meanwhile. `told`: in shared memory.
  __device__ __forceinline__ GivenList(const Parameters& params, uint32_t batch, uint32_t token, int32_t* told) {
    const int32_t* const lists = params.lists + static_cast<int64_t>(batch) * params.lists_batch;
    const int32_t all = params.s_q * params.topk;  // below 2^31, see spec.py
    if (threadIdx.x < 2) told[threadIdx.x] = max(min(lists[token + threadIdx.x], all), 0);
    __syncthreads();  // both are there
    const int32_t begin = told[0];
    count = max(told[1] - begin, 0);
    list = lists + params.s_kv + 1 + begin;
  }

  // How many of them are below a number. All lanes of a warp look at once, each at the end of a part.
  __device__ __forceinline__ int32_t below(int64_t number) const {
    const int lane = threadIdx.x % 32;
    int32_t low = 0, end = count;
    while (low < end) {
      const int32_t part = (end - low - 1) / 32 + 1;
      const int64_t last = low + static_cast<int64_t>(lane + 1) * part - 1;
      const bool is_below = last < end && list[last] < number;
      low += __popc(__ballot_sync(0xffffffffu, is_below)) * part;
      end = min(end, low + part - 1);
    }
    return low;
  }
};

// The first query of a batch entry that sees a token: as `SparseQuery` has it, whose division truncates toward zero.
__device__ __forceinline__ int64_t first_to_see(const Parameters& params, uint32_t token) {
  if (params.causal == 0) return 0;
  return (token == 0 ? 0 : (token + int64_t{1}) * params.k_stride - 1) - params.q_start;
}

template <typename Sum>
struct SumRows {
  enum : int { kThreads = Sum::kThreads };
  static constexpr int kSorted = 1024;               // lists up to this length are sorted
  static constexpr int kWindow = 32 * 1024;          // longer ones are gone through in windows of entries

  const Parameters& params;
  int32_t (&words)[kSorted];  // in shared memory: a list in order, or a window's entries as bits
  const int32_t entries = all_entries(params);
  Sum sum = {};

  // Every entry's rank is the number of smaller ones: no two are equal, unless another kernel has spoilt the list.
  __device__ __forceinline__ void sort_and_add(const int32_t* list, int32_t count) {
    if constexpr (Sum::kClearsList) {
      for (int32_t i = threadIdx.x; i < count; i += kThreads) words[i] = 0;
      __syncthreads();
    }
    for (int32_t i = threadIdx.x; i < count; i += kThreads) {
      const int32_t entry = list[i];
      int32_t rank = 0;
      for (int32_t j = 0; j < count; ++j) rank += list[j] < entry;
      words[rank] = Sum::listed(entry, entries);
    }
    __syncthreads();
    sum.add_list(params, entries, words, count);
  }

  __device__ __forceinline__ void add_by_windows(const int32_t* list, int32_t count) {
    for (int64_t window = 0; window < entries; window += kWindow) {
      for (int i = threadIdx.x; i < kSorted; i += kThreads) words[i] = 0;
      __syncthreads();
      for (int32_t i = threadIdx.x; i < count; i += kThreads) {
        const int64_t place = list[i] - window;
        if (place >= 0 && place < kWindow) atomicOr(words + place / 32, 1 << (place % 32));
      }
      __syncthreads();
      for (int word = 0; word < kSorted; ++word) {
        for (uint32_t bits = words[word]; bits != 0; bits &= bits - 1) {
          const int32_t entry = static_cast<int32_t>(window) + word * 32 + __ffs(static_cast<int>(bits)) - 1;
          sum.add(params, entries, Sum::listed(entry, entries));
        }
      }
      __syncthreads();
    }
  }

  // Adds what the launch's queries have in the caller's lists; returns whether there is anything.
  __device__ __forceinline__ bool add_given(uint32_t batch, uint32_t token) {
    const GivenList given(params, batch, token, words);
    const int64_t before = static_cast<int64_t>(batch) * params.s_q;  // queries of other batch entries
    const int64_t last = min(params.query_end - before, static_cast<int64_t>(params.s_q));
    const int64_t first = min(max(params.query_begin - before, first_to_see(params, token)), last);
    const int warp = threadIdx.x / 32;
    if (warp < 2) {
      const int32_t place = given.below((warp == 0 ? first : last) * params.topk);
      if (threadIdx.x % 32 == 0) words[2 + warp] = place;
    }
    __syncthreads();  // where the launch's part begins and ends
    const int32_t begin = words[2], end = words[3];
    const int64_t number = (params.query_begin - before) * params.topk;  // of the launch's first entry
    for (int32_t piece = begin; piece < end; piece += kSorted) {
      const int32_t count = min(end - piece, kSorted);
      __syncthreads();  // words are read
      for (int32_t i = threadIdx.x; i < count; i += kThreads) {
        words[i] = Sum::listed(static_cast<int32_t>(given.list[piece + i] - number), entries);
      }
      __syncthreads();  // words are there
      sum.add_list(params, entries, words, count);
    }
    return begin < end;
  }

  // The same with what the stage `list` has made.
  __device__ __forceinline__ bool add_listed(int64_t row) {
    const int32_t begin = row == 0 ? 0 : params.row_ends[row - 1];
    const int32_t count = min(params.row_ends[row], entries) - begin;
    if (count <= 0) return false;
    const int32_t* list = params.entry_list + begin;
    if (count <= kSorted) {
      sort_and_add(list, count);
    } else {
      add_by_windows(list, count);
    }
    return true;
  }

  __device__ __forceinline__ void run(int64_t row) {
    const uint32_t batch = static_cast<uint32_t>(row / params.s_kv), token = static_cast<uint32_t>(row % params.s_kv);
    const bool adds = params.lists != nullptr ? add_given(batch, token) : add_listed(row);
    if (adds && sum.takes_part) sum.add_to(params.sums + batch * params.sums_batch + token * params.sums_token);
  }
};

template <int kDQk>
__device__ __forceinline__ void sum_rows(const Parameters& params) {
  __shared__ int32_t words[SumRows<PlainSum<kDQk>>::kSorted];
  SumRows<PlainSum<kDQk>>{params, words}.run(blockIdx.x);
}

}  // namespace cupymla::sparse_mla_bwd
