// Index scores of paged keys, for decoding on Hopper: memory binds, so key tiles of 64 stream through a deep ring to
// whichever consumer is next, and one pass over a request's keys serves all its queries. README.md has the roofline,
// storage.cuh the barriers, work.cuh who takes what, common/indexer_score.cuh the order of operations.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/registers.cuh"
#include "consumer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

namespace cupymla::paged_indexer {

// By a lane of as many warps: one lane after another would hold up its warp.
__device__ __forceinline__ void init_barriers(Storage& storage, const ScoringParameters& params, uint32_t thread) {
  const uint32_t warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  if (thread % 32 != 0) return;
  if (warp < ThisConfig::kQueryBuffers) {
    storage.q_full[warp].init(32 + 1);
    storage.q_free[warp].init(4 * ThisConfig::kConsumers);
  }
  if (warp < ThisConfig::kMostStages) {
    storage.k_full[warp].init(tiles_are_whole(params) ? 1 : 32 + 1);
    storage.k_free[warp].init(4);
  }
  fence_mbarrier_init();
}

static_assert(ThisConfig::kQueryBuffers <= ThisConfig::kMostStages);
static_assert(ThisConfig::kMostStages <= ThisConfig::kThreads / 32);

}  // namespace cupymla::paged_indexer

extern "C" __global__ void __launch_bounds__(cupymla::paged_indexer::ThisConfig::kThreads, 1)
    paged_indexer_logits(const __grid_constant__ cupymla::TensorMap q_map,
                         const __grid_constant__ cupymla::TensorMap k_map,
                         const __grid_constant__ cupymla::paged_indexer::ScoringParameters params) {
  using namespace cupymla;
  using namespace cupymla::paged_indexer;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);

  // What selects from the scores may come as soon as there is room. It waits for them.
  griddepcontrol_launch_dependents();
  const uint32_t thread = threadIdx.x;
  prefetch_lengths(params.paged, thread);
  if (thread == ThisConfig::kConsumerThreads) tma_prefetch_descriptor(k_map);
  if (thread - ThisConfig::kConsumerThreads < 32) prefetch_queries(params, q_map, static_cast<int>(thread % 32));
  const int32_t block = guessed_block(params.paged, thread);
  prefetch_tables(params.paged);
  init_barriers(storage, params, thread);
  const WorkAssignment work = work_of_cta(params);
  prefetch_key(params, block, thread);
  __syncthreads();

  const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == ThisConfig::kConsumers) {
    warpgroup_reg_dealloc<ThisConfig::kProducerRegisters>();
    const uint32_t warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      load_queries(storage, params, work, q_map);
    } else if (warp <= ThisConfig::kKeyWarps) {
      KeyLoader(storage, params, k_map, warp - 1).run(work);
    }
  } else {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters>();
    Consumer consumer(storage, params, warpgroup);
    consumer.run(work);
    consumer.fill();
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::paged_indexer::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::paged_indexer::Storage),
                     parameter_bytes = sizeof(cupymla::paged_indexer::ScoringParameters),
                     pass_queries = cupymla::paged_indexer::ThisConfig::kQueries,
                     tile_queries = cupymla::paged_indexer::ThisConfig::kGroupQueries,
                     tile_heads = cupymla::paged_indexer::ThisConfig::kHeads,
                     tile_keys = cupymla::paged_indexer::ThisConfig::kTileKeys,
                     tile_bytes = cupymla::paged_indexer::ThisConfig::kSpan,
                     warpgroup_registers = cupymla::paged_indexer::ThisConfig::kWarpgroupRegisters);
