// What a CTA pair, or one by itself, works on: one block of heads of one query after another. Where there are few
// queries, those of a cluster share the entries of one. A CTA by itself is a pair of one here.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

// Where a CTA stands in its cluster.
template <typename Config>
struct CtaPosition {
  uint32_t rank;         // in its pair; the even CTA issues the pair's products
  uint32_t leader;       // the pair's even CTA, in the cluster
  uint32_t part, parts;  // which of how many pairs

  __device__ __forceinline__ CtaPosition()
      : rank(cluster_rank() % Config::kCtas),
        leader(Config::kSplit ? cluster_rank() - rank : 0u),
        part(leader / Config::kCtas),
        parts(Config::kSplit ? cluster_size() / Config::kCtas : 1u) {}
};

// A query, this CTA's heads of it and the pair's KV blocks.
template <typename Config>
struct Work : SparseQuery<Config::kTileKeys> {
  int32_t first_head;
  int32_t first_block;  // of the pair's `blocks`

  // Head blocks of a query are neighbours, so that the second finds the gathered rows in L2.
  // `entries` as all roles that wait for each other are told it (lengths.cuh).
  __device__ __forceinline__ Work(const Parameters& params, uint32_t item, const CtaPosition<Config>& cta,
                                  int32_t entries)
      : SparseQuery<Config::kTileKeys>(params, item / params.head_blocks, entries),
        first_head(static_cast<int32_t>(item % params.head_blocks * Config::kItemHeads + cta.rank * Config::kHeads)),
        first_block(0) {
    if constexpr (Config::kSplit) {
      auto& blocks = this->blocks;
      const int32_t own_blocks = (blocks + static_cast<int32_t>(cta.parts) - 1) / static_cast<int32_t>(cta.parts);
      first_block = min(static_cast<int32_t>(cta.part) * own_blocks, blocks);
      blocks = min(blocks - first_block, own_blocks);
    }
  }

  __device__ __forceinline__ int32_t first_entry(int32_t block) const {
    return (first_block + block) * Config::kTileKeys;
  }
};

// Which items a cluster takes.
struct Items {
  uint32_t first, step;

  template <typename Config>
  __device__ __forceinline__ explicit Items(const CtaPosition<Config>& cta)
      : first(blockIdx.x / (Config::kCtas * cta.parts)), step(gridDim.x / (Config::kCtas * cta.parts)) {}
};

// Calls `body` with each item of this cluster; all warps of its CTAs go through the same ones.
template <typename Config, typename Body>
__device__ __forceinline__ void for_each_item(const Parameters& params, const CtaPosition<Config>& cta, Body body) {
  const Items items(cta);
  for (uint32_t item = items.first; item < params.items; item += items.step) body(item);
}

}  // namespace cupymla::sparse_mla_fwd
