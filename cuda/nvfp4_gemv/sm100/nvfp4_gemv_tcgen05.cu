// Block-scaled 4-bit matrix times 1 to 16 block-scaled 4-bit vectors on the Tensor Core of sm_100f, scales in the 128x4
// layout. The pipeline and the barriers are in ../README.md, the mathematics in cupymla/ops/nvfp4_gemv/README.md.
#include "../../common/warp.cuh"
#include "../../common/entry.cuh"
#include "check.cuh"
#include "load.cuh"
#include "merge.cuh"
#include "multiply.cuh"

// CUPYMLA_MXFP4: 1 for MXFP4, 0 for NVFP4. CUPYMLA_COLUMNS: what n is padded to, 8 or 16.
namespace cupymla::nvfp4_gemv {

using ThisConfig = Config<CUPYMLA_MXFP4 != 0, CUPYMLA_COLUMNS>;
using ThisStorage = Storage<ThisConfig>;

static_assert(kFitsTwice<ThisConfig>, "two CTAs on a multiprocessor keep its memory busy while one begins or ends");

template <class C>
__device__ __forceinline__ void prepare(Storage<C>& storage, const Maps& maps) {
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < C::kStages; ++stage) {
      storage.full[stage].init(1);
      storage.ready[stage].init(C::kCheckWarps);
      storage.empty[stage].init(1);
    }
    storage.done.init(1);
    fence_mbarrier_init();
  }
  if (threadIdx.x == C::kLoadWarp * 32) {
    tma_prefetch_descriptor(maps.a);
    tma_prefetch_descriptor(maps.a_scales);
    tma_prefetch_descriptor(maps.b);
    tma_prefetch_descriptor(maps.b_scales);
  }
  if (threadIdx.x / 32 == C::kMultiplyWarp) {
    sm100::tmem_allocate(&storage.tmem, C::kTmemColumns);
    sm100::tmem_relinquish();
  }
  sm100::fence_before_sync();
  __syncthreads();
  sm100::fence_after_sync();
}

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::ThisConfig::kThreads, 2)
    nvfp4_gemv_tcgen05(const __grid_constant__ cupymla::TensorMap a,
                       const __grid_constant__ cupymla::TensorMap a_scales,
                       const __grid_constant__ cupymla::TensorMap b,
                       const __grid_constant__ cupymla::TensorMap b_scales,
                       const __grid_constant__ cupymla::nvfp4_gemv::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::nvfp4_gemv;
  using C = ThisConfig;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const Maps maps{a, a_scales, b, b_scales};
  prepare(storage, maps);
  const uint32_t warp = threadIdx.x / 32, tmem = storage.tmem;
  const Slice<C> slice(params);
  if (warp == C::kLoadWarp) {
    if (elect_one()) load(storage, maps, slice);
  } else if (warp == C::kMultiplyWarp) {
    if (elect_one()) multiply(storage, tmem, slice);
  } else {
    Checker<C>(storage, params, threadIdx.x).run(slice);
    keep_sums(storage, tmem, slice);
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  if (warp == C::kMultiplyWarp) {
    sm100::fence_after_sync();
    sm100::tmem_free(tmem, C::kTmemColumns);
  }
  write_rows(storage, params, slice);
  // Others of the cluster may still be reading this CTA's sums.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::ThisConfig::kThreads, cluster = 8,
                     smem_bytes = sizeof(cupymla::nvfp4_gemv::ThisStorage),
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::Parameters),
                     columns = cupymla::nvfp4_gemv::ThisConfig::kColumns,
                     chunk = cupymla::nvfp4_gemv::ThisConfig::kChunk,
                     tile_rows = cupymla::nvfp4_gemv::ThisConfig::kTileRows,
                     scale_block_bytes = cupymla::nvfp4_gemv::ThisConfig::kScaleBlockBytes,
                     vector_block_bytes = cupymla::nvfp4_gemv::ThisConfig::kVectorBlockBytes,
                     scale_blocks = cupymla::nvfp4_gemv::ThisConfig::kScaleBlocks);
