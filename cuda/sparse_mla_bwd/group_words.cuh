// Where tokens stand in the lists of query groups, so that all rows of a token are found in the order of query groups:
// for each query group and 32 tokens, which of them it has and how many row entries come before.
#pragma once

#include "query_group.cuh"

namespace cupymla::sparse_mla_bwd {

struct alignas(8) GroupWord {
  uint32_t tokens;  // a bit for each of 32
  uint32_t before;  // row entries before them, and kHasRepeated
};

// Behind its tokens a query group has further row entries, of those that a query names once more, in the order of
// `repeated_key`.
constexpr uint32_t kHasRepeated = 1u << 31;

template <int kQueries>
__device__ __forceinline__ uint32_t repeated_key(int32_t row_entry) {
  return static_cast<uint32_t>(token_of(row_entry)) << kQueries | queries_of(row_entry);
}

// Of the query group number `place` of those that are listed. They lie where lists of entries are when queries are not
// packed.
__device__ __forceinline__ GroupWord* group_words(const Parameters& params, uint32_t place) {
  const int64_t words = (static_cast<int64_t>(params.s_kv) + 31) / 32;
  return reinterpret_cast<GroupWord*>(params.row_ends) + place * words;
}

// Rows that a query has room for, or a query group of several, which stores whole blocks of 64.
template <int kQueries>
__device__ __forceinline__ int32_t stored_rows(const Parameters& params) {
  return kQueries == 1 ? params.topk : (kQueries * params.topk + 63) / 64 * 64;
}

}  // namespace cupymla::sparse_mla_bwd
