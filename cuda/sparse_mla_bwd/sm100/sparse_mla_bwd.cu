// Sparse MLA attention, gradients, for Blackwell: one stage of the backward for each value of CUPYMLA_STAGE. How the
// stages follow each other is told in ../README.md, the mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "attention.cuh"
#include "small_head_attention.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_STAGE: which stage this is, see `Stage`.
// For the attention stage, CUPYMLA_HEADS: heads of one head block, 128, or 64 where no query has more.
// CUPYMLA_PARTIALS: 1 where every entry's dKV row is stored on its own.

namespace cupymla::sparse_mla_bwd {

#if CUPYMLA_HEADS == 64
using ThisConfig = SmallHead<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = SmallHeadStorage<ThisConfig>;
#else
using ThisConfig = ManyHeads<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = Storage<ThisConfig>;
#endif
static_assert(CUPYMLA_HEADS == ThisConfig::kHeads);

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
constexpr unsigned kStageThreads = kIsAttention ? ThisConfig::kThreads : kPrePostThreads[CUPYMLA_STAGE];
constexpr unsigned kStageCluster = kIsAttention ? ThisConfig::kCluster : 1;
constexpr unsigned kStageTmemColumns = kIsAttention ? ThisConfig::kTmemColumns : 0;
constexpr unsigned kStageSmemBytes = kIsAttention ? sizeof(ThisStorage) : 0;  // dynamic

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kStageThreads, 1)
    sparse_mla_bwd(
#if CUPYMLA_STAGE == 0
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
        const __grid_constant__ cupymla::TensorMap kv_map,
#endif
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using cupymla::Element;
  using namespace cupymla::sparse_mla_bwd;
#if CUPYMLA_STAGE == 0
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  attention<ThisConfig, Element, CUPYMLA_FP16>(*reinterpret_cast<ThisStorage*>(shared_memory), params, q_map, dout_map,
                                               kv_map);
#else
  pre_post_process<CUPYMLA_STAGE, CUPYMLA_D_QK, Element>(params);
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kStageThreads,
                     cluster = cupymla::sparse_mla_bwd::kStageCluster,
                     smem_bytes = cupymla::sparse_mla_bwd::kStageSmemBytes,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     block_heads = cupymla::sparse_mla_bwd::ThisConfig::kHeads,
                     tmem_columns = cupymla::sparse_mla_bwd::kStageTmemColumns);
