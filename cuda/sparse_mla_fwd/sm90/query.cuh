// What a CTA works on: one block of heads of one or several neighbouring queries. Where there are fewer queries than
// SMs, the CTAs of a cluster share the slots of one query.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

using Query = QueryPosition;

template <typename Config>
__device__ __forceinline__ uint32_t query_parts() {
  return Config::kSplit ? cluster_size() : 1u;
}

template <typename Config>
struct Share : QueryRange {
  int32_t first_head;
  uint32_t part, parts;  // which of how many parts of each query's slots

  // Head blocks of a query are neighbours, so that the second finds the gathered rows in L2.
  __device__ __forceinline__ explicit Share(const Parameters& params)
      : QueryRange(blockIdx.x / query_parts<Config>() / params.head_blocks, params.groups, params.group_tokens),
        first_head(static_cast<int32_t>(blockIdx.x / query_parts<Config>() % params.head_blocks) * Config::kHeads),
        part(Config::kSplit ? cluster_rank() : 0u),
        parts(query_parts<Config>()) {}
};

// Which slots of a query are valid, and which of them fall to this CTA. Valid slots are numbered without gaps, so that
// KV blocks are full and a query costs what its valid slots cost.
template <typename Config>
struct Selection : SparseQuery<Config::kSlots> {
  using Slots = SparseQuery<Config::kSlots>;

  const int32_t* indices;
  int32_t valid = 0;                    // valid slots
  int32_t first_block = 0, blocks = 0;  // KV blocks of this CTA

  // A whole warp. Its lanes search together, so they go by what one of them has read of topk_length.
  __device__ __forceinline__ Selection(const Parameters& params, uint32_t token)
      : Slots(params, token,
              __shfl_sync(0xffffffffu, Slots::read_slots(params, QueryPosition(params, token)), 0)),
        indices(params.indices + this->batch * params.indices_batch + this->query * params.indices_query) {}

  // The token of a slot, or -1 where there is no slot.
  __device__ __forceinline__ int32_t token(int32_t slot) const {
    return slot < this->slots ? __ldg(indices + slot) : -1;
  }

  __device__ __forceinline__ bool is_valid(int32_t token) const {
    return static_cast<uint32_t>(token) < this->token_limit;
  }

  // Takes this CTA's share of the KV blocks, once the valid slots are counted.
  __device__ __forceinline__ void take(int32_t valid_slots, const Share<Config>& share) {
    valid = valid_slots;
    blocks = (valid + Config::kSlots - 1) / Config::kSlots;
    if constexpr (Config::kSplit) {
      // Pairs of blocks stay together: each keeps both consumers busy.
      const int32_t pairs = (blocks + 1) / 2;
      const int32_t own_blocks = 2 * ((pairs + share.parts - 1) / share.parts);
      first_block = min(static_cast<int32_t>(share.part) * own_blocks, blocks);
      blocks = min(blocks - first_block, own_blocks);
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
