// What a 2-CTA cluster works on, and which heads and columns each of them has.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"
#include "cluster_storage.cuh"
#include "pinned_position.cuh"

namespace cupymla::sparse_mla_bwd {

// The head that is at a place of Q and dO: head tiles of 32 are the first CTA's and the second's in turn, and a CTA has
// its own before the other's.
template <typename Config>
__device__ __forceinline__ int32_t head_of_place(int32_t head_block, int place) {
  return head_block * Config::kHeads + (place ^ static_cast<int32_t>(cluster_rank() * Config::kHeadTile));
}

// The place of an own head, counted without the other CTA's.
template <typename Config>
__device__ __forceinline__ int place_of_own(int own) {
  return own / Config::kHeadTile * 2 * Config::kHeadTile + own % Config::kHeadTile;
}

// What is kept of the query, as often as it is wanted.
template <typename Config>
__device__ __forceinline__ int32_t stored_entries(const ClusterStorage<Config>& storage) {
  return *static_cast<const volatile int32_t*>(&storage.entries);
}

template <typename Config>
__device__ __forceinline__ uint32_t stored_limit(const ClusterStorage<Config>& storage) {
  return *static_cast<const volatile uint32_t*>(&storage.limit);
}

template <typename Config>
__device__ __forceinline__ int32_t stored_head_block(const ClusterStorage<Config>& storage) {
  return *static_cast<const volatile int32_t*>(&storage.head_block);
}

template <typename Config>
__device__ __forceinline__ QueryPosition stored_position(const ClusterStorage<Config>& storage) {
  struct OneQuery {
    int32_t s_q;
  };
  QueryPosition position(OneQuery{1}, *static_cast<const volatile uint32_t*>(&storage.batch));
  position.query = *static_cast<const volatile int32_t*>(&storage.query);
  return position;
}

}  // namespace cupymla::sparse_mla_bwd
