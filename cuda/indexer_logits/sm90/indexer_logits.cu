// Index scores of all keys for each query, for Hopper: keys are the rows of the products and lie in registers, the
// heads of a query are the columns, so that a sum over heads stays in four lanes. README.md has the roofline,
// storage.cuh the barriers, common/indexer_score.cuh the order of operations.
#include "../../common/entry.cuh"
#include "../../common/registers.cuh"
#include "consumer.cuh"
#include "producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

namespace cupymla::indexer_logits {

__device__ __forceinline__ void init_barriers(Storage& storage) {
  for (int buffer = 0; buffer < ThisConfig::kQueryBuffers; ++buffer) {
    storage.run_full[buffer].init(1);
    storage.q_full[buffer].init(32 + 1);
    storage.q_free[buffer].init(ThisConfig::kWarpgroup * ThisConfig::kConsumers + 1);
  }
  for (int stage = 0; stage < ThisConfig::kKeyStages; ++stage) {
    storage.k_full[stage].init(1);
    storage.k_free[stage].init(4);
  }
  fence_mbarrier_init();
}

}  // namespace cupymla::indexer_logits

extern "C" __global__ void __launch_bounds__(cupymla::indexer_logits::ThisConfig::kThreads, 1)
    indexer_logits(const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap k_map,
                   const __grid_constant__ cupymla::indexer_logits::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::indexer_logits;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);

  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(k_map);
    init_barriers(storage);
  }
  find_work(storage, params);

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == ThisConfig::kConsumers) {
    warpgroup_reg_dealloc<ThisConfig::kProducerRegisters>();
    const uint32_t warp = threadIdx.x / 32 % 4;
    if (warp == 0) load_queries(storage, params, q_map);
    if (warp == 1 && threadIdx.x % 32 == 0) load_keys(storage, params, k_map);
  } else {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters>();
    Consumer(storage, params, warpgroup).run();
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_logits::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::indexer_logits::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_logits::Parameters),
                     tile_queries = cupymla::indexer_logits::ThisConfig::kQueries,
                     tile_heads = cupymla::indexer_logits::ThisConfig::kHeads,
                     tile_keys = cupymla::indexer_logits::ThisConfig::kKeyRows,
                     tile_bytes = cupymla::indexer_logits::ThisConfig::kSpan,
                     consumers = cupymla::indexer_logits::ThisConfig::kConsumers,
                     warpgroup_registers = cupymla::indexer_logits::ThisConfig::kWarpgroupRegisters);
