// Neighbouring queries that take their rows together, and lists of these rows; of a query by itself too.
#pragma once

#include "../common/sparse_query.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_bwd {

// An entry of a list: a token, and one bit for each query that has a valid slot for it; of a query by itself the token
// alone. A token that a query names several times has as many entries.
constexpr int kTokenBits = 17;
constexpr int32_t kMaxTokens = 1 << kTokenBits;  // of one batch entry
constexpr int32_t kMaxEntries = 8192;            // of a bunch: its queries' slots
constexpr int32_t kMaxTokensAlone = 1 << 18;     // of one batch entry, where a list is of one query

__device__ __forceinline__ int32_t token_of(int32_t entry) { return entry & (kMaxTokens - 1); }
__device__ __forceinline__ uint32_t queries_of(int32_t entry) { return static_cast<uint32_t>(entry) >> kTokenBits; }
__device__ __forceinline__ int32_t make_entry(uint32_t token, uint32_t queries) {
  return static_cast<int32_t>(queries << kTokenBits | token);
}
template <int kQueries>
__device__ __forceinline__ int32_t make_entry_of(uint32_t token, uint32_t queries) {
  return kQueries == 1 ? static_cast<int32_t>(token) : make_entry(token, queries);
}

// How many entries a list has, as it is kept; with kApart where a row has numbers that are not finite. Its queries have
// to be taken apart then, lest what is zero for one query, times such a number, becomes NaN.
constexpr uint32_t kApart = 1u << 31;
__device__ __forceinline__ int32_t rows_of(uint32_t count) { return static_cast<int32_t>(count & ~kApart); }

// A bunch; `query` is its first. Bunches of a batch entry are counted on from those of the one before.
template <int kQueries>
struct Bunch : QueryPosition {
  static_assert(kTokenBits + kQueries < 32);

  __device__ __forceinline__ Bunch(const Parameters& params, uint32_t index)
      : QueryPosition(params, first_token(params, index)) {}

  static __device__ __forceinline__ uint32_t first_token(const Parameters& params, uint32_t index) {
    const uint32_t bunches = (static_cast<uint32_t>(params.s_q) - 1) / kQueries + 1;
    return index / bunches * params.s_q + index % bunches * kQueries;
  }

  // Where the list begins of the launch's bunch number `place`: each has room for all slots of its queries. The host
  // keeps all lists of a launch well below 2^32 entries.
  static __device__ __forceinline__ uint32_t first_entry(const Parameters& params, uint32_t place) {
    return place * kQueries * params.topk;
  }
};

}  // namespace cupymla::sparse_mla_bwd
