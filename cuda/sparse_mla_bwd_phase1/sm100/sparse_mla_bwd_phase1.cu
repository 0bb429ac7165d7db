// First phase of the sparse MLA backward, for Blackwell: the scores of every entry and delta. A CTA pair has 128
// heads of a query. The mathematics are in cupymla/ops/sparse_mla_bwd_phase1/README.md, the pipeline is in storage.cuh.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "delta.cuh"
#include "products.cuh"
#include "scores.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16.

namespace cupymla::sparse_mla_bwd_phase1 {

using ThisConfig = Config<CUPYMLA_D_QK>;
using ThisStorage = Storage<ThisConfig>;

template <typename Config>
__device__ __forceinline__ void set_up(Storage<Config>& storage, const Work<Config>& work, const Parameters& params,
                                       const TensorMap& q_map, const TensorMap& kv_map) {
  // If topk_length changed under way and each role read it for itself, they would wait for blocks that never come.
  int32_t& entries = storage.entries[threadIdx.x % Config::kMostQueries];
  const uint32_t token = work.range.token + threadIdx.x;
  const bool reads = threadIdx.x < Config::kMostQueries && token < work.range.end;
  if (reads && work.rank == 0) entries = Query<Config>::read_entries(params, QueryPosition(params, token));
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(kv_map);
    storage.q_full.init(1);
    storage.q_free.init(1);
    for (int i = 0; i < Config::kStages; ++i) storage.k_full[i].init(1), storage.k_free[i].init(1);
    for (int i = 0; i < Config::kAccumulators; ++i) {
      storage.scores_full[i].init(1);
      storage.scores_free[i].init(Config::kCluster * Config::kScoreWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();
  if (reads && work.rank != 0) entries = cluster_load_int32(cluster_address(smem_address(&entries), 0));
  // Columns are allocated in both CTAs of a pair at once, so both have to be there (PTX ISA, "tcgen05.alloc").
  if (threadIdx.x / 32 == Config::kQueryWarp) {
    sm100::tmem_allocate<2>(&storage.tmem, Config::kTmemColumns);
    sm100::tmem_relinquish<2>();
  }
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
}

}  // namespace cupymla::sparse_mla_bwd_phase1

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd_phase1::ThisConfig::kThreads, 1)
    sparse_mla_bwd_phase1(const __grid_constant__ cupymla::TensorMap q_map,
                          const __grid_constant__ cupymla::TensorMap kv_map,
                          const __grid_constant__ cupymla::sparse_mla_bwd_phase1::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_bwd_phase1;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const Work<ThisConfig> work(params, storage.entries);
  set_up(storage, work, params, q_map, kv_map);

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  constexpr int kTiles = ThisConfig::kTiles, kLeftTiles = ThisConfig::kLeftTiles;
  if (warp == ThisConfig::kLeftGatherWarp) {
    gather_keys<ThisConfig, 0, kLeftTiles>(storage, work, params, kv_map);
  } else if (warp == ThisConfig::kRightGatherWarp) {
    gather_keys<ThisConfig, kLeftTiles, kTiles>(storage, work, params, kv_map);
  } else if (warp == ThisConfig::kMultiplyWarp) {
    multiply<ThisConfig, CUPYMLA_FP16>(storage, work, params);
  } else if (warp == ThisConfig::kQueryWarp) {
    load_queries(storage, work, params, q_map);
  } else if (warp < 8) {
    store_scores(storage, work, params);
  } else {
    store_delta<ThisConfig, Element>(work, params);
  }

  __syncwarp();
  sm100::fence_before_sync();
  cluster_arrive();
  cluster_wait();
  sm100::fence_after_sync();
  if (warp == ThisConfig::kQueryWarp) sm100::tmem_free<2>(storage.tmem, ThisConfig::kTmemColumns);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd_phase1::ThisConfig::kThreads,
                     cluster = cupymla::sparse_mla_bwd_phase1::ThisConfig::kCluster,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd_phase1::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd_phase1::Parameters),
                     cta_heads = cupymla::sparse_mla_bwd_phase1::ThisConfig::kHeads,
                     cluster_queries = cupymla::sparse_mla_bwd_phase1::ThisConfig::kMostQueries,
                     tmem_columns = cupymla::sparse_mla_bwd_phase1::ThisConfig::kTmemColumns);
