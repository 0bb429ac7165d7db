// What a CTA works on: one query with its entries, or neighbouring queries with the rows that any of
// them has a valid entry for; and which query and head each of its 64 rows of Q and dO is.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/sparse_query.cuh"
#include "../query_group.cuh"
#include "../params.cuh"
#include "pinned_position.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

// First head of a head block.
template <typename Config>
__device__ __forceinline__ int32_t first_head(int32_t head_block) {
  return Config::kQueries > 1 ? 0 : head_block * Config::kHeads;
}

template <typename Config>
__device__ __forceinline__ int head_of_row(int row) {
  return Config::kQueries == 1 ? row : row % Config::kQueryHeads;
}

template <typename Config>
__device__ __forceinline__ QueryPosition query_of_row(QueryPosition first, int row) {
  if constexpr (Config::kQueries > 1) first.query += row / Config::kQueryHeads;
  return first;
}

// The last of several queries may lie past the end.
template <typename Config>
__device__ __forceinline__ bool exists(const Parameters& params, const QueryPosition& query) {
  return Config::kQueries == 1 || query.query < params.s_q;
}

// A query by itself. One thread reads how many entries there are: if topk_length changed under way and each read it for
// itself, they would wait for blocks that never come.
template <typename Config, bool kSeveral = (Config::kQueries > 1)>
struct Work : SparseQuery<Config::kTileKeys> {
  __device__ __forceinline__ Work(const Parameters& params, uint32_t token, const Storage<Config>& storage)
      : SparseQuery<Config::kTileKeys>(params, token, storage.entries) {}

  static __device__ __forceinline__ void read_entries(const Parameters& params, uint32_t token,
                                                      Storage<Config>& storage) {
    storage.entries = SparseQuery<Config::kTileKeys>::read_entries(params, QueryPosition(params, token));
  }

  // An ordinary load: in the place of indices there may be lists that the kernel before has written.
  template <typename Gather>
  __device__ __forceinline__ int32_t load_row_entry(const Parameters& params, const Gather& gather, int block) const {
    const int32_t* indices =
        params.indices + this->batch * params.indices_batch + this->query * params.indices_query;
    const int entry = block * Config::kTileKeys + gather.warp * gather.kWarpKeys + gather.lane % gather.kWarpKeys;
    return entry < this->entries ? indices[entry] : -1;
  }
  __device__ __forceinline__ bool has_block(int block) const { return block < this->blocks; }
  static __device__ __forceinline__ int32_t token(int32_t row_entry, uint32_t) { return row_entry; }
  static __device__ __forceinline__ bool has_head_block(const Parameters& params, const Storage<Config>&,
                                                           int32_t head_block) {
    if constexpr (Config::kPacked) return head_block == 0;  // known, so that there is no register for it
    return head_block < params.head_blocks;
  }
};

template <typename Config>
struct Work<Config, true> : QueryGroup<Config::kQueries> {
  // Rows that the queries have in all. Read whenever it is wanted: there is no register to keep it in.
  const volatile int32_t& entries;
  uint32_t token_limit;  // as a row of any of them can be

  __device__ __forceinline__ Work(const Parameters& params, uint32_t index, const Storage<Config>& storage)
      : QueryGroup<Config::kQueries>(params, index), entries(storage.entries), token_limit(params.s_kv) {}

  static __device__ __forceinline__ void read_entries(const Parameters& params, uint32_t,
                                                      Storage<Config>& storage) {
    const uint32_t count = params.row_counts[blockIdx.x];
    storage.entries = rows_of(count);
    storage.non_finite = count & kNonFinite;
  }

  // Where the list begins is worked out each time, or it would take a register of the gather. An ordinary load, as the
  // kernel before has written it.
  template <typename Gather>
  __device__ __forceinline__ int32_t load_row_entry(const Parameters& params, const Gather& gather, int block) const {
    uint32_t place = blockIdx.x;
    make_opaque(place);
    const int row = block * Config::kTileKeys + gather.warp * gather.kWarpKeys + gather.lane % gather.kWarpKeys;
    return row < entries ? params.rows[this->first_row_entry(params, place) + row] : -1;
  }
  __device__ __forceinline__ bool has_block(int block) const { return block * Config::kTileKeys < entries; }
  // Negative for rows that none of the queries has.
  static __device__ __forceinline__ int32_t token(int32_t row_entry, uint32_t queries) {
    return row_entry >= 0 && (queries_of(row_entry) & queries) != 0 ? token_of(row_entry) : -1;
  }
  // The first, or one for each query: that is decided in the first.
  static __device__ __forceinline__ bool has_head_block(const Parameters&, const Storage<Config>& storage,
                                                           int32_t head_block) {
    return head_block == 0 || (head_block < Config::kQueries && storage.non_finite != 0);
  }

  // The distribution of one of the queries, and which of its entries it is that names a row.
  __device__ __forceinline__ float* distribution(const Parameters& params, int own) const {
    const QueryPosition first = pinned_position(*this);
    return params.attn_dist + first.batch * params.attn_dist_batch + (first.query + own) * params.attn_dist_query;
  }
  __device__ __forceinline__ int32_t named_by(const Parameters& params, int32_t row, int own) const {
    uint32_t place = blockIdx.x;
    make_opaque(place);
    const int64_t row_entry = this->first_row_entry(params, place) + row;
    return params.row_topk_entries[row_entry * Config::kQueries + own];
  }
};

}  // namespace cupymla::sparse_mla_bwd
