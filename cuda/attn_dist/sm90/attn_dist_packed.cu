// The attention distribution summed over heads, for Hopper, where heads are few: a CTA packs eight neighbouring queries
// and gathers each KV row that any of them has once. The pipeline and the barriers are drawn in packed_storage.cuh, the
// mathematics are in cupymla/ops/attn_dist/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/registers.cuh"
#include "packed_consumer.cuh"
#include "packed_producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16.

namespace cupymla::attn_dist {

using ThisConfig = PackedConfig<CUPYMLA_D_QK>;
using ThisStorage = PackedStorage<ThisConfig>;

__device__ __forceinline__ void init_barriers(ThisStorage& storage) {
  constexpr uint32_t kProducers = ThisConfig::kWarpgroup;
  constexpr uint32_t kConsumers = ThisConfig::kWarpgroup * ThisConfig::kConsumers;
  for (int buffer = 0; buffer < ThisConfig::kBuffers; ++buffer) {
    for (int part = 0; part < ThisConfig::kParts; ++part) {
      storage.full[buffer][part].init(kProducers + (part == ThisConfig::kValidityPart ? 4 : 0));
    }
    storage.free[buffer][0].init(kConsumers);
    storage.free[buffer][1].init(kConsumers);
  }
  for (int consumer = 0; consumer < ThisConfig::kConsumers; ++consumer)
    storage.order[consumer].init(ThisConfig::kWarpgroup);
  fence_mbarrier_init();
}

}  // namespace cupymla::attn_dist

extern "C" __global__ void __launch_bounds__(cupymla::attn_dist::ThisConfig::kThreads, 1)
    attn_dist_packed(const __grid_constant__ cupymla::TensorMap q_map,
                     const __grid_constant__ cupymla::attn_dist::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::attn_dist;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    init_barriers(storage);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == ThisConfig::kConsumers) {
    warpgroup_reg_dealloc<ThisConfig::kProducerRegisters>();
    PackedProducer<ThisConfig>(storage, params, q_map).run();
  } else {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters>();
    PackedConsumer<ThisConfig, Element>(storage, params, warpgroup).run();
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::attn_dist::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::attn_dist::ThisStorage),
                     parameter_bytes = sizeof(cupymla::attn_dist::Parameters),
                     tile_heads = cupymla::attn_dist::ThisConfig::kQueryHeads,
                     tile_queries = cupymla::attn_dist::ThisConfig::kConsumerQueries,
                     tile_keys = cupymla::attn_dist::ThisConfig::kTileKeys,
                     warpgroup_registers = cupymla::attn_dist::ThisConfig::kWarpgroupRegisters);
