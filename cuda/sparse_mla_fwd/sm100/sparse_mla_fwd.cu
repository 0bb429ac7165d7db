// Sparse MLA attention, forward, for Blackwell: a CTA pair takes 128 heads of one query after another, or a CTA by
// itself takes 64. The pipelines and the barriers are drawn in storage.cuh and small_head_storage.cuh, Tensor Memory in
// config.cuh, the mathematics are in cupymla/ops/sparse_mla_fwd/README.md.
#include "../../common/warp.cuh"
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "small_head_products.cuh"
#include "small_head_storage.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "softmax.cuh"
#include "storage.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_HEADS: 128, which a CTA pair takes, or 64, which one does; either serves any
// h_q. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_ANY_SCALE: 1 where sm_scale may be zero, negative or tiny, which
// costs a multiplication per score; 0 where it is surely positive in fp32. CUPYMLA_SPLIT: 1 where those of each cluster
// share the entries of one query.

namespace cupymla::sparse_mla_fwd {

#if CUPYMLA_HEADS == 64
using ThisConfig = SmallHead<CUPYMLA_D_QK, CUPYMLA_SPLIT>;
using ThisStorage = SmallHeadStorage<ThisConfig>;
using ThisProducts = SmallHeadProducts<ThisStorage, CUPYMLA_FP16>;
#else
using ThisConfig = ManyHeads<CUPYMLA_D_QK, CUPYMLA_SPLIT>;
using ThisStorage = Storage<ThisConfig>;
using ThisProducts = Products<ThisStorage, CUPYMLA_FP16>;
#endif
static_assert(CUPYMLA_HEADS == ThisConfig::kItemHeads);

// The last warp's work: in a pair, values.
template <typename Storage>
__device__ __forceinline__ void last_warp(Storage& storage, const Parameters& params, const TensorMap& q_map,
                                          const TensorMap& kv_map) {
  using Config = typename Storage::Config;
  if constexpr (Config::kCtas == 2) {
    ValueWarp<Storage>(storage, params, q_map, kv_map).run();
  } else if (cluster_rank() == Config::kReaderRank) {
    LengthReader<Storage>(storage, params).run();
  }
}

// The work of the warp that issues products: in a pair's other CTA it has none, and may read lengths.
template <typename Products, typename Storage>
__device__ __forceinline__ void products_warp(Storage& storage, const Parameters& params) {
  using Config = typename Storage::Config;
  if (Config::kReaderWarp == Config::kMmaWarp && cluster_rank() == Config::kReaderRank) {
    LengthReader<Storage>(storage, params).run();
  } else if (cluster_rank() % Config::kCtas == 0 && elect_one()) {
    Products(storage, params).run();
  }
}

}  // namespace cupymla::sparse_mla_fwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_fwd::ThisConfig::kThreads, 1)
    sparse_mla_fwd(const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap kv_map,
                   const __grid_constant__ cupymla::sparse_mla_fwd::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_fwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  constexpr int kCtas = ThisConfig::kCtas;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(kv_map);
    storage.init_barriers(CtaPosition<ThisConfig>().parts);
  }
  cluster_arrive();
  cluster_wait();
  // Columns are allocated in both CTAs of a pair at once, so both have to be there (PTX ISA, "tcgen05.alloc").
  if (warp == ThisConfig::kMmaWarp) {
    sm100::tmem_allocate<kCtas>(&storage.tmem, ThisConfig::kTmemColumns);
    sm100::tmem_relinquish<kCtas>();
  }
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();

  if (warp < ThisConfig::kEpilogueWarp) {
    Softmax<ThisStorage, Element, CUPYMLA_ANY_SCALE>(storage, params).run();
  } else if (warp < ThisConfig::kMmaWarp) {
    Epilogue<ThisStorage, Element>(storage, params, q_map).run();
  } else if (warp == ThisConfig::kLastWarp) {
    last_warp(storage, params, q_map, kv_map);
  } else if (warp >= ThisConfig::kKeyWarp) {
    KeyWarp<ThisStorage>(storage, params, q_map, kv_map).run();
  } else {
    products_warp<ThisProducts>(storage, params);
  }
  __syncwarp();

  if constexpr (ThisConfig::kSplit) {
    cluster_arrive();
    cluster_wait();
    if (warp >= ThisConfig::kEpilogueWarp && warp < ThisConfig::kMmaWarp) {
      Epilogue<ThisStorage, Element>(storage, params, q_map).merge();
    }
  }

  sm100::fence_before_sync();
  cluster_arrive();
  cluster_wait();
  sm100::fence_after_sync();
  if (warp == ThisConfig::kMmaWarp) sm100::tmem_free<kCtas>(storage.tmem, ThisConfig::kTmemColumns);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_fwd::ThisConfig::kThreads,
                     // A CTA by itself hands lengths on by st.async too, to itself.
                     cluster = cupymla::sparse_mla_fwd::ThisConfig::kMaxCluster, clustered = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_fwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_fwd::Parameters),
                     heads_per_cta = cupymla::sparse_mla_fwd::ThisConfig::kHeads,
                     tmem_columns = cupymla::sparse_mla_fwd::ThisConfig::kTmemColumns);
