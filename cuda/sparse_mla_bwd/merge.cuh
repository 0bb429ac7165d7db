// Stage `merge`: for each query group of neighbouring queries, which rows they have in all and which of them each query
// has. Rows are listed in the order of tokens; behind them come those that a query names once more. Stage `sort`
// (token_order.cuh) is the same for query groups of one query.
#pragma once

#include "../common/math.cuh"
#include "../common/grid_dependency.cuh"
#include "../common/warp.cuh"
#include "query_group.cuh"
#include "group_words.cuh"
#include "dkv_rows.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kMergeThreads = 512;

template <int kQueries>
struct MergeStorage {
  static constexpr int kWords = (kQueries == 1 ? kMaxTokensSingle : kMaxTokens) / 32;
  uint32_t members[kQueries][kWords];           // one bit for each token that a query has a valid entry for
  uint32_t before[kWords];                      // rows listed before those of the word
  uint32_t warp_rows[kMergeThreads / 32];
  uint32_t repeated;                            // row entries of tokens that a query has named before
  uint32_t non_finite;                          // kNonFinite where a row has numbers that are not finite, else 0
};

// A CTA to a query group. kFixedOrder: whether row entries of tokens that are named once more have an order too, by
// token and query, and where a token stands in the list is told as well (group_words.cuh).
template <int kQueries, bool kFixedOrder = false>
struct Merge {
  static constexpr int kOwn = kMaxEntries / kQueries / kMergeThreads;  // entries of a query that a thread has

  MergeStorage<kQueries>& storage;
  const Parameters& params;
  const QueryGroup<kQueries> query_group;
  int32_t tokens[kQueries][kOwn];  // of this thread's entries, -1 where there is none or it is not valid
  uint32_t named_before = 0;       // one bit for each of them: another entry of the query was first

  __device__ __forceinline__ Merge(MergeStorage<kQueries>& storage, const Parameters& params)
      : storage(storage),
        params(params),
        query_group(params, params.query_begin + blockIdx.x) {}

  __device__ __forceinline__ void run() {
    for (int word = threadIdx.x; word < words(); word += kMergeThreads) {
#pragma unroll
      for (int own = 0; own < kQueries; ++own) storage.members[own][word] = 0;
    }
    if (threadIdx.x == 0) storage.repeated = storage.non_finite = 0;
    read_tokens();
    __syncthreads();
    mark_members();
    __syncthreads();
    const uint32_t rows = list_rows();
    __syncthreads();
    if constexpr (kFixedOrder) {
      find_places(rows);
      __syncthreads();
      if (storage.repeated != 0) sort_repeated(rows);
      if (params.row_topk_entries != nullptr) tell_entries(rows);
    } else {
      place_entries(rows);
    }
    __syncthreads();
    if (threadIdx.x == 0) params.row_counts[blockIdx.x] = (rows + storage.repeated) | storage.non_finite;
  }

  // A row entry of the query group's list.
  __device__ __forceinline__ int32_t& row_entry(uint32_t place) const {
    return params.rows[query_group.first_row_entry(params, blockIdx.x) + place];
  }

  __device__ __forceinline__ int words() const { return (params.s_kv + 31) / 32; }

  // Every entry once: whoever writes to the indices meanwhile, all that follows goes by what was read here.
  __device__ __forceinline__ void read_tokens() {
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
      const bool exists = query_group.query + own < params.s_q;
      const uint32_t token = static_cast<uint32_t>(query_group.batch) * params.s_q + query_group.query + own;
      const SparseQuery<64> query(params, exists ? token : 0);
      const int32_t* indices =
          params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int32_t entry = i * kMergeThreads + threadIdx.x;
        const int32_t named = exists && entry < query.entries ? __ldg(indices + entry) : -1;
        tokens[own][i] = static_cast<uint32_t>(named) < query.token_limit ? named : -1;
      }
    }
  }

  // Whether a row of this thread's has numbers that are not finite.
  __device__ __forceinline__ bool names_non_finite_row() const {
    const uint8_t* non_finite_rows = params.non_finite_rows + static_cast<int64_t>(query_group.batch) * params.s_kv;
    uint32_t non_finite = 0;
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // Without a branch, so that all loads are under way at once; where there is no token there is a mask.
        const int32_t token = tokens[own][i];
        non_finite |= non_finite_rows[max(token, 0)] & ~(token >> 31);
      }
    }
    return non_finite != 0;
  }

  __device__ __forceinline__ void mark_members() {
    // A query by itself has no other to keep them from.
    if constexpr (kQueries > 1) {
      if (names_non_finite_row()) atomicOr(&storage.non_finite, kNonFinite);
    }
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int32_t token = tokens[own][i];
        if (token < 0) continue;
        const uint32_t bit = 1u << token % 32;
        if ((atomicOr(&storage.members[own][token / 32], bit) & bit) != 0) named_before |= 1u << (own * kOwn + i);
      }
    }
  }

  __device__ __forceinline__ uint32_t any(int word) const {
    uint32_t bits = 0;
#pragma unroll
    for (int own = 0; own < kQueries; ++own) bits |= storage.members[own][word];
    return bits;
  }

  // Lists each token that any query has, and says how many there are. A thread takes neighbouring words.
  __device__ __forceinline__ uint32_t list_rows() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int share = (words() + kMergeThreads - 1) / kMergeThreads;
    const int begin = min(static_cast<int>(threadIdx.x) * share, words()), end = min(begin + share, words());
    uint32_t count = 0;
    for (int word = begin; word < end; ++word) count += __popc(any(word));
    const uint32_t through = warp_scan(count, lane);
    if (lane == 31) storage.warp_rows[warp] = through;
    __syncthreads();
    uint32_t place = through - count, rows = 0;
    for (int other = 0; other < kMergeThreads / 32; ++other) {
      if (other < warp) place += storage.warp_rows[other];
      rows += storage.warp_rows[other];
    }
    for (int word = begin; word < end; ++word) {
      storage.before[word] = place;
      if constexpr (kFixedOrder) group_words(params, blockIdx.x)[word] = GroupWord{any(word), place};
      for (uint32_t bits = any(word); bits != 0; bits &= bits - 1) {
        const int bit = __ffs(static_cast<int>(bits)) - 1;
        uint32_t queries = 0;
#pragma unroll
        for (int own = 0; own < kQueries; ++own) queries |= (storage.members[own][word] >> bit & 1u) << own;
        row_entry(place++) = make_row_entry_of<kQueries>(word * 32 + bit, queries);
      }
    }
    return rows;
  }

  // Which top-k entry of each query a row entry stands for.
  struct alignas(2 * kQueries) Entries {
    uint16_t of[kQueries];
  };
  static_assert(kMaxEntries * sizeof(Entries) <= sizeof(MergeStorage<kQueries>::members));

  // Lists tokens that are named once more, and says of every row entry which top-k entries it stands for.
  __device__ __forceinline__ void place_entries(uint32_t rows) {
    if (params.row_topk_entries == nullptr && named_before == 0) return;
    find_places(rows);
    if (params.row_topk_entries == nullptr) return;
    tell_entries(rows);
  }

  __device__ __forceinline__ void tell_entries(uint32_t rows) {
    // Nobody needs the bits any more. What is put together in their place leaves in a row: two bytes here and there in
    // global memory would take L2 a sector each.
    auto* const entries = reinterpret_cast<Entries*>(storage.members);
    __syncthreads();
    const uint32_t row_entries = rows + storage.repeated;
    if constexpr (kQueries > 1) {
      // A query that a row entry does not stand for has no top-k entry there.
      for (uint32_t place = threadIdx.x; place < row_entries; place += kMergeThreads) entries[place] = Entries{};
      __syncthreads();
    }
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int32_t place = tokens[own][i];
        if (place >= 0) entries[place].of[own] = static_cast<uint16_t>(i * kMergeThreads + threadIdx.x);
      }
    }
    __syncthreads();
    auto* const to =
        reinterpret_cast<Entries*>(params.row_topk_entries) + query_group.first_row_entry(params, blockIdx.x);
    for (uint32_t place = threadIdx.x; place < row_entries; place += kMergeThreads) to[place] = entries[place];
  }

  // Which of equal entries of a query was first is left to chance, but they are the same to all that is summed.
  __device__ __forceinline__ void sort_repeated(uint32_t rows) {
    auto* const listed = reinterpret_cast<int32_t*>(storage.members);  // which nobody needs any more
    const uint32_t repeated = storage.repeated;
    for (uint32_t i = threadIdx.x; i < repeated; i += kMergeThreads) listed[i] = row_entry(rows + i);
    for (int word = threadIdx.x; word < words(); word += kMergeThreads) {
      group_words(params, blockIdx.x)[word].before |= kHasRepeated;
    }
    __syncthreads();
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if ((named_before >> (own * kOwn + i) & 1u) == 0) continue;
        const uint32_t at = static_cast<uint32_t>(tokens[own][i]) - rows;
        const int32_t entry = listed[at];
        const uint32_t key = repeated_key<kQueries>(entry);
        uint32_t rank = 0;
        for (uint32_t j = 0; j < repeated; ++j) {
          const uint32_t other = repeated_key<kQueries>(listed[j]);
          rank += other < key || (other == key && j < at);
        }
        row_entry(rows + rank) = entry;
        tokens[own][i] = static_cast<int32_t>(rows + rank);
      }
    }
  }

  // Of this thread's top-k entries that are valid the row entry's place, in the place of the token.
  __device__ __forceinline__ void find_places(uint32_t rows) {
#pragma unroll
    for (int own = 0; own < kQueries; ++own) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int32_t token = tokens[own][i];
        if (token < 0) continue;
        uint32_t place;
        if ((named_before >> (own * kOwn + i) & 1u) != 0) {
          place = rows + atomicAdd(&storage.repeated, 1u);
          row_entry(place) = make_row_entry_of<kQueries>(token, 1u << own);
        } else {
          place = storage.before[token / 32] + __popc(any(token / 32) & ((1u << token % 32) - 1));
        }
        tokens[own][i] = static_cast<int32_t>(place);
      }
    }
  }
};

// Beside `zero`: marks rows of kv that have numbers that are not finite. A warp to a row.
template <int kDQk, typename Element>
__device__ __forceinline__ void mark_non_finite_rows(const Parameters& params) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < params.kv_rows; row += row_stride()) {
    const uint8_t* start = params.kv + row / params.s_kv * params.kv_batch_bytes +
                           row % params.s_kv * params.kv_token_bytes;
    float finite = 0.f;
    for (int chunk = lane; chunk < kDQk / 8; chunk += 32) {
      finite += dot_eight<Element>(__ldg(reinterpret_cast<const uint4*>(start) + chunk), uint4{});
    }
    const bool non_finite = __any_sync(0xffffffffu, !(finite == 0.f));
    if (lane == 0) params.non_finite_rows[row] = non_finite;
  }
}

template <int kQueries, bool kFixedOrder = false>
__device__ __forceinline__ void merge(MergeStorage<kQueries>& storage, const Parameters& params) {
  wait_for_primary_grid(params.has_dependent != 0);
  if (params.query_begin + blockIdx.x >= params.query_end) return;
  Merge<kQueries, kFixedOrder>(storage, params).run();
}

}  // namespace cupymla::sparse_mla_bwd
