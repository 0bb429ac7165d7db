// What a CTA works on: one block of heads of one or several neighbouring queries. Where there are fewer queries than
// SMs, the CTAs of a cluster share the entries of one query.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

using Query = QueryPosition;

template <typename Config>
__device__ __forceinline__ uint32_t query_ctas() {
  return Config::kSplit ? cluster_size() : 1u;
}

template <typename Config>
struct WorkAssignment : QueryRange {
  int32_t first_head;
  uint32_t part, parts;  // which of how many parts of each query's entries

  // Head blocks of a query are neighbours, so that the second finds the gathered rows in L2. CTAs that share rows have
  // neighbouring ranks, and one head block after the other.
  __device__ __forceinline__ explicit WorkAssignment(const Parameters& params)
      : QueryRange(blockIdx.x / query_ctas<Config>() / params.head_blocks, params.groups, params.group_tokens),
        first_head(static_cast<int32_t>(blockIdx.x / query_ctas<Config>() % params.head_blocks * Config::kSharers +
                                        sharer()) *
                   Config::kHeads),
        part(Config::kSplit ? cluster_rank() / Config::kSharers : 0u),
        parts(query_ctas<Config>() / Config::kSharers) {}

  // Which of the CTAs that share rows this one is.
  static __device__ __forceinline__ uint32_t sharer() {
    return Config::kSharers > 1 ? cluster_rank() % Config::kSharers : 0u;
  }

  // The rank of the CTA that has a part of the same heads.
  static __device__ __forceinline__ uint32_t rank_of(uint32_t part) { return part * Config::kSharers + sharer(); }
};

// Which entries of a query are valid, and which of them fall to this CTA. Valid entries are numbered without gaps, so
// that KV blocks are full and a query costs what its valid entries cost.
template <typename Config>
struct Selection : SparseQuery<Config::kTileKeys> {
  using Entries = SparseQuery<Config::kTileKeys>;

  const int32_t* indices;
  int32_t valid = 0;                    // valid entries
  int32_t first_block = 0, blocks = 0;  // KV blocks of this CTA

  // A whole warp. Its lanes search together, so they go by what one of them has read of topk_length.
  __device__ __forceinline__ Selection(const Parameters& params, uint32_t token)
      : Entries(params, token,
                __shfl_sync(0xffffffffu, Entries::read_entries(params, QueryPosition(params, token)), 0)),
        indices(params.indices + this->batch * params.indices_batch + this->query * params.indices_query) {}

  // The token of an entry, or -1 where there is no entry.
  __device__ __forceinline__ int32_t token(int32_t entry) const {
    return entry < this->entries ? __ldg(indices + entry) : -1;
  }

  __device__ __forceinline__ bool is_valid(int32_t token) const {
    return static_cast<uint32_t>(token) < this->token_limit;
  }

  // Takes this CTA's share of the KV blocks, once the valid entries are counted.
  __device__ __forceinline__ void take(int32_t valid_entries, const WorkAssignment<Config>& work) {
    valid = valid_entries;
    blocks = (valid + Config::kTileKeys - 1) / Config::kTileKeys;
    if constexpr (Config::kSplit) {
      // Pairs of blocks stay together: each keeps both consumers busy.
      const int32_t pairs = (blocks + 1) / 2;
      const int32_t own_blocks = 2 * ((pairs + work.parts - 1) / work.parts);
      first_block = min(static_cast<int32_t>(work.part) * own_blocks, blocks);
      blocks = min(blocks - first_block, own_blocks);
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
