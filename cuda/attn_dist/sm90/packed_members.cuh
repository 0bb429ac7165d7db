// Which rows eight neighbouring queries have in all, and which of them each query has. The producer's work before it
// gathers.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../../common/warp.cuh"
#include "packed_storage.cuh"
#include "params.cuh"

namespace cupymla::attn_dist {

// Bit `token` of a query's members; tokens are below kMaxTokens.
__device__ __forceinline__ uint32_t member_word(const uint64_t* members, uint32_t token) {
  return reinterpret_cast<const uint32_t*>(members)[token / 32];
}

template <typename Config>
struct Members {
  static constexpr int kLoads = 16;  // of indices that a lane has under way

  PackedStorage<Config>& storage;
  const Parameters& params;
  const int warp;
  const int lane;

  // Words of 64 tokens.
  __device__ __forceinline__ int words() const { return (params.s_kv + 63) / 64; }

  // Lists the rows of a query group, by all four warps.
  __device__ __forceinline__ void list(int set) const {
    for (int own = 0; own < Config::kProducerQueries; ++own) find(set, warp * Config::kProducerQueries + own);
    named_barrier_sync(kMembersFound, Config::kWarpgroup);
    list_tokens(set);
    named_barrier_sync(kTokensListed, Config::kWarpgroup);
  }

  // The members of one query, by one warp.
  __device__ __forceinline__ void find(int set, int own) const {
    uint64_t* members = storage.members[set][own];
    for (int word = lane; word < words(); word += 32) members[word] = 0;
    __syncwarp();
    const QueryGroup& query_group = storage.query_group[set];
    if (query_group.first_query + own < params.s_q) mark(members, query_group.batch, query_group.first_query + own);
    __syncwarp();
    uint32_t total = 0;
    for (int first = 0; first < words(); first += 32) {
      const int word = first + lane;
      const uint32_t count = word < words() ? __popcll(members[word]) : 0;
      const uint32_t through = warp_scan(count, lane);
      if (word < words()) storage.before[set][own][word] = static_cast<uint16_t>(total + through - count);
      total += __shfl_sync(0xffffffffu, through, 31);
    }
  }

  __device__ __forceinline__ void mark(uint64_t* members, int32_t batch, int32_t query) const {
    const SparseQuery<Config::kTileKeys> sparse(params, static_cast<uint32_t>(batch) * params.s_q + query);
    const int32_t* indices = params.indices + batch * params.indices_batch + query * params.indices_query;
    uint32_t* words = reinterpret_cast<uint32_t*>(members);
    for (int32_t first = lane; first < sparse.entries; first += 32 * kLoads) {
      uint32_t token[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t entry = first + 32 * i;
        token[i] = entry < sparse.entries ? static_cast<uint32_t>(__ldg(indices + entry)) : 0xffffffffu;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (token[i] < sparse.token_limit) atomicOr(words + token[i] / 32, 1u << token[i] % 32);
      }
    }
  }

  // The tokens that any query has, in order.
  __device__ __forceinline__ void list_tokens(int set) const {
    // Each thread takes neighbouring words.
    const int thread = warp * 32 + lane;
    const int share = (words() + Config::kWarpgroup - 1) / Config::kWarpgroup;
    const int begin = min(thread * share, words()), end = min(begin + share, words());
    uint32_t count = 0;
    for (int word = begin; word < end; ++word) count += __popcll(any(set, word));
    const uint32_t through = warp_scan(count, lane);
    if (lane == 31) storage.warp_rows[warp] = through;
    named_barrier_sync(kRowsCounted, Config::kWarpgroup);
    uint32_t place = through - count, total = 0;
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      const uint32_t rows = storage.warp_rows[other];
      place += other < warp ? rows : 0u;
      total += rows;
    }
    if (thread == 0) storage.rows = total;
    for (int word = begin; word < end; ++word) {
      for (uint64_t bits = any(set, word); bits != 0; bits &= bits - 1) {
        storage.tokens[place++] = static_cast<uint16_t>(word * 64 + __ffsll(static_cast<long long>(bits)) - 1);
      }
    }
  }

  __device__ __forceinline__ uint64_t any(int set, int word) const {
    uint64_t bits = 0;
#pragma unroll
    for (int query = 0; query < Config::kQueries; ++query) bits |= storage.members[set][query][word];
    return bits;
  }

  // How many of a query's tokens come before `token`.
  __device__ __forceinline__ uint16_t place(int set, int query, uint32_t token) const {
    const uint64_t lower = storage.members[set][query][token / 64] & ((1ull << token % 64) - 1);
    return static_cast<uint16_t>(storage.before[set][query][token / 64] + __popcll(lower));
  }

  // Tells consumers which of a block's rows are whose. Lanes hold the tokens of the warp's sixteen rows, -1 for none.
  __device__ __forceinline__ void publish(int set, PipelineState state, int32_t token) const {
    uint32_t own = 0;
#pragma unroll
    for (int query = 0; query < Config::kQueries; ++query) {
      const uint32_t word = token < 0 ? 0u : member_word(storage.members[set][query], token);
      const uint32_t rows = __ballot_sync(0xffffffffu, (word >> (token & 31) & 1u) != 0);
      if (lane == query) own = rows;
    }
    // The place that the first row would have, the query's or not, is that of the first one that is.
    const int32_t first = __shfl_sync(0xffffffffu, token, 0);
    if (lane < Config::kQueries) {
      storage.row_sets[state.row_set()][lane][warp] = {static_cast<uint16_t>(own),
                                                       first < 0 ? uint16_t{0} : place(set, lane, first)};
    }
    __syncwarp();
  }
};

}  // namespace cupymla::attn_dist
