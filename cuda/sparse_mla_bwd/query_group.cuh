// Packed queries: neighbouring ones whose rows are gathered once. Lists of these rows, and of a query by itself.
#pragma once

#include "../common/sparse_query.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

// A row entry of a list: a token, and one bit for each query that has a valid entry for it; of a query by itself the
// token alone. A token that a query names several times has as many.
constexpr int kTokenBits = 17;
constexpr int32_t kMaxTokens = 1 << kTokenBits;  // of one batch entry
constexpr int32_t kMaxEntries = 8192;            // top-k entries of a query group
constexpr int32_t kMaxTokensSingle = 1 << 18;    // of one batch entry, where a list is of one query

__device__ __forceinline__ int32_t token_of(int32_t row_entry) { return row_entry & (kMaxTokens - 1); }
__device__ __forceinline__ uint32_t queries_of(int32_t row_entry) {
  return static_cast<uint32_t>(row_entry) >> kTokenBits;
}
__device__ __forceinline__ int32_t make_row_entry(uint32_t token, uint32_t queries) {
  return static_cast<int32_t>(queries << kTokenBits | token);
}
template <int kQueries>
__device__ __forceinline__ int32_t make_row_entry_of(uint32_t token, uint32_t queries) {
  return kQueries == 1 ? static_cast<int32_t>(token) : make_row_entry(token, queries);
}

// How many row entries a list has, as it is kept; with kNonFinite where a row has numbers that are not finite. Its
// queries have to be taken one by one then, lest what is zero for one query, times such a number, becomes NaN.
constexpr uint32_t kNonFinite = 1u << 31;
__device__ __forceinline__ int32_t rows_of(uint32_t count) { return static_cast<int32_t>(count & ~kNonFinite); }

// A query group; `query` is its first. Query groups of a batch entry are counted on from those of the one before.
template <int kQueries>
struct QueryGroup : QueryPosition {
  static_assert(kTokenBits + kQueries < 32);

  __device__ __forceinline__ QueryGroup(const Parameters& params, uint32_t index)
      : QueryPosition(params, first_token(params, index)) {}

  static __device__ __forceinline__ uint32_t first_token(const Parameters& params, uint32_t index) {
    const uint32_t query_groups = (static_cast<uint32_t>(params.s_q) - 1) / kQueries + 1;
    return index / query_groups * params.s_q + index % query_groups * kQueries;
  }

  // Where the list begins of the launch's query group number `place`: each has room for all top-k entries of its
  // queries. The host keeps all lists of a launch well below 2^32 row entries.
  static __device__ __forceinline__ uint32_t first_row_entry(const Parameters& params, uint32_t place) {
    return place * kQueries * params.topk;
  }
};

}  // namespace cupymla::sparse_mla_bwd
