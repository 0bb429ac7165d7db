// The attention distribution summed over heads, for Blackwell: a CTA pair, or one CTA for up to 64 heads, takes all
// heads of a query, one query after another. The pipeline and the barriers are drawn in storage.cuh, the mathematics
// are in cupymla/ops/attn_dist/README.md.
#include "../../common/warp.cuh"
#include "../../common/entry.cuh"
#include "epilogue.cuh"
#include "multiplier.cuh"
#include "planner.cuh"
#include "producer.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_HEADS: heads of one head block, 128, or 64
// where no query has more.
namespace cupymla::attn_dist {

using ThisConfig = Config<CUPYMLA_D_QK, CUPYMLA_HEADS>;
using ThisStorage = Storage<ThisConfig>;

__device__ __forceinline__ void init_barriers(ThisStorage& storage) {
  constexpr uint32_t kEpilogueWarps = ThisConfig::kEpilogueWarps;
  for (int i = 0; i < ThisConfig::kHeadBlocks; ++i) {
    storage.head_block_full[i].init(1);
    storage.head_block_free[i].init(ThisConfig::kCtas * (kEpilogueWarps + ThisConfig::kProducerWarps) + 1);
  }
  for (int i = 0; i < ThisConfig::kTiles; ++i) storage.q_full[i].init(1), storage.q_free[i].init(1);
  for (int i = 0; i < ThisConfig::kStages; ++i) storage.k_full[i].init(1), storage.k_free[i].init(1);
  for (int i = 0; i < ThisConfig::kAccumulators; ++i) {
    storage.done[i].init(1);
    storage.taken[i].init(ThisConfig::kCtas * kEpilogueWarps);
  }
  storage.mass_ready.init(ThisConfig::kCtas * kEpilogueWarps);
  fence_mbarrier_init();
}

// All threads of all CTAs that work together.
__device__ __forceinline__ void sync_all() {
  if constexpr (ThisConfig::kCtas == 2) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

}  // namespace cupymla::attn_dist

extern "C" __global__ void __launch_bounds__(cupymla::attn_dist::ThisConfig::kThreads, 1)
    attn_dist(const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap kv_map,
              const __grid_constant__ cupymla::attn_dist::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::attn_dist;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int rank = ThisConfig::kCtas == 2 ? static_cast<int>(cluster_rank()) : 0;

  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(kv_map);
    init_barriers(storage);
  }
  // Columns are allocated in both CTAs of a pair at once, so both have to be there (PTX ISA, "tcgen05.alloc").
  if constexpr (ThisConfig::kCtas == 2) sync_all();
  if (warp == ThisConfig::kMultiplier) {
    sm100::tmem_allocate<ThisConfig::kCtas>(&storage.tmem, kTmemColumns<ThisConfig>);
    sm100::tmem_relinquish<ThisConfig::kCtas>();
  }
  __syncthreads();

  if (warp < ThisConfig::kEpilogueWarps) {
    Epilogue<ThisConfig>(storage, params, rank).run();
  } else if (warp < ThisConfig::kPlanner) {
    // With elect.sync the compiler knows that one thread issues, which a comparison of lanes does not tell it.
    if (elect_one()) Producer<ThisConfig>(storage, q_map, kv_map, rank).run();
    __syncwarp();
  } else if (warp == ThisConfig::kPlanner) {
    if (rank == 0) Planner<ThisConfig>(storage, params).run();
  } else {
    // The election comes first: behind a condition on the rank, the compiler does not tell that one thread is left.
    if (elect_one() && rank == 0) Multiplier<ThisConfig, CUPYMLA_FP16 != 0>(storage).run();
    __syncwarp();
  }

  sync_all();
  if (warp == ThisConfig::kMultiplier) {
    sm100::fence_after_sync();
    sm100::tmem_free<ThisConfig::kCtas>(storage.tmem, kTmemColumns<ThisConfig>);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::attn_dist::ThisConfig::kThreads,
                     // A CTA by itself hands lengths on by st.async too, to itself.
                     cluster = cupymla::attn_dist::ThisConfig::kCtas, clustered = 1,
                     smem_bytes = sizeof(cupymla::attn_dist::ThisStorage),
                     parameter_bytes = sizeof(cupymla::attn_dist::Parameters),
                     tile_heads = cupymla::attn_dist::ThisConfig::kCtaHeads,
                     tile_keys = cupymla::attn_dist::ThisConfig::kTileKeys,
                     tmem_columns = cupymla::attn_dist::kTmemColumns<cupymla::attn_dist::ThisConfig>);
