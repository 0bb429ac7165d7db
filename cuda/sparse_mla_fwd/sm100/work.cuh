// What a pair of CTAs works on: one block of heads of one query after another.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

// A query and this CTA's heads of it.
template <typename Config>
struct Work : SparseQuery<Config::kSlots> {
  int32_t first_head;

  // Head blocks of a query are neighbours, so that the second finds the gathered rows in L2.
  __device__ __forceinline__ Work(const Parameters& params, uint32_t item, uint32_t rank)
      : SparseQuery<Config::kSlots>(params, item / params.head_blocks),
        first_head(static_cast<int32_t>(item % params.head_blocks * Config::kPairHeads + rank * Config::kHeads)) {}

  // Groups of 64 slots whose keys each CTA gathers of a block: one will do for the last 128 slots or fewer.
  __device__ __forceinline__ int groups(int32_t block) const {
    return this->slots - block * Config::kSlots > Config::kHalfSlots ? 2 : 1;
  }
};

// Calls `body` with each item of this pair; all warps of both CTAs go through the same ones.
template <typename Body>
__device__ __forceinline__ void for_each_item(const Parameters& params, Body body) {
  const uint32_t pairs = gridDim.x / 2;
  for (uint32_t item = blockIdx.x / 2; item < params.items; item += pairs) body(item);
}

}  // namespace cupymla::sparse_mla_fwd
