// What kernels of `lse`, `target`, `dq` and `dk` have in common: one producer warp, two consumers.
#pragma once

#include "../../common/sm90/warpgroups.cuh"
#include "../../common/tma.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::indexer_loss_dense {

using RoleWarpgroups = sm90::Warpgroups<kConsumers, 40, 232>;

// Where a CTA of a grid over blocks of keys, then over parts of the rows, works.
struct Place {
  int32_t first_key, part;

  __device__ __forceinline__ explicit Place(const Parameters& params) {
    const int32_t blocks = static_cast<int32_t>(params.row_stride / kBlockKeys);
    first_key = static_cast<int32_t>(blockIdx.x) % blocks * kBlockKeys;
    part = static_cast<int32_t>(blockIdx.x) / blocks;
  }
};

// Roles: what a kernel has: the type of its shared memory, and what the thread that makes barriers ready does besides,
// the producer warp, and a consumer.
template <typename Roles>
__device__ __forceinline__ void take_roles(typename Roles::Storage& storage, const TensorMap& heads_map,
                                           const TensorMap& keys_map, const Parameters& params) {
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(heads_map);
    tma_prefetch_descriptor(keys_map);
    init_barriers(storage);
    Roles::begin(params);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == kConsumers) {
    warpgroup_reg_dealloc<RoleWarpgroups::kProducerRegisters>();
    if (threadIdx.x / 32 % 4 == 0) Roles::produce(storage, heads_map, keys_map, params);
  } else {
    warpgroup_reg_alloc<RoleWarpgroups::kConsumerRegisters>();
    Roles::consume(storage, params, warpgroup);
  }
}

}  // namespace cupymla::indexer_loss_dense
