// What both attention kernels begin and end with.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/cluster.cuh"
#include "../../common/sm100/tcgen05.cuh"

namespace cupymla::sparse_mla_bwd {

// Barriers and Tensor Memory of this CTA; `init_barriers` is the storage's own.
template <typename Storage>
__device__ __forceinline__ void set_up(Storage& storage) {
  using Config = typename Storage::Config;
  if (threadIdx.x == 0) {
    init_barriers(storage);
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

}  // namespace cupymla::sparse_mla_bwd
