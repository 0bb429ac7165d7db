// What both attention kernels begin and end with.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/cluster.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// The barriers that both storages have.
template <typename Storage>
__device__ __forceinline__ void init_barriers(Storage& storage) {
  using Config = typename Storage::Config;
  storage.heads_full.init(1);
  storage.delta_full.init(Config::kCluster * Config::kWorkerWarps);
  storage.k_full.init(1);
  storage.k_free.init(1);
  for (Mbarrier& full : storage.entries_full) full.init(1);
  for (int i = 0; i < 2; ++i) {
    storage.scores_full[i].init(1);
    storage.received[i].init(1);
  }
  storage.tiles_full.init(Config::kCluster * Config::kWorkerWarps);
  storage.tiles_free.init(Config::kCluster);
  for (int i = 0; i < Config::kPlaces; ++i) {
    storage.part_full[i].init(1);
    storage.part_free[i].init(Config::kReducerWarps);
  }
}

// Barriers and Tensor Memory of this CTA; `init_own_barriers` knows those that only the one storage has.
template <typename Storage>
__device__ __forceinline__ void set_up(Storage& storage) {
  using Config = typename Storage::Config;
  if (threadIdx.x == 0) {
    init_barriers(storage);
    init_own_barriers(storage);
    fence_mbarrier_init();
  }
  if (threadIdx.x / 32 == Config::kMultiplyWarp) {
    sm100::tmem_allocate(&storage.tmem, Config::kTmemColumns);
    sm100::tmem_relinquish();
  }
  sm100::fence_before_sync();
  __syncthreads();
}

// Every thread of both CTAs has come here; what they did in Tensor Memory is through.
__device__ __forceinline__ void sync_cluster() {
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  sm100::fence_after_sync();
}

// Sets up, waits for the primary grid, and gives the query, with the entries that one thread of the pair has read: if
// topk_length changed under way and each read it for itself, they would wait for blocks that never come.
template <typename Storage>
__device__ __forceinline__ SparseQuery<Storage::Config::kTileKeys> begin_query(
    Storage& storage, const Parameters& params, uint32_t token) {
  using Query = SparseQuery<Storage::Config::kTileKeys>;
  set_up(storage);
  wait_for_primary_grid(params.has_dependent != 0);
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    storage.entries = Query::read_entries(params, QueryPosition(params, token));
  }
  sync_cluster();
  const int32_t entries = cluster_load_int32(cluster_address(smem_address(&storage.entries), 0));
  // From one lane, so that the compiler knows warps to stay together.
  return Query(params, token, __shfl_sync(0xffffffffu, entries, 0));
}

}  // namespace cupymla::sparse_mla_bwd
