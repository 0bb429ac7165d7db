// Sparse MLA attention, gradients, for Hopper: one stage of the backward for each value of CUPYMLA_STAGE. How the
// stages follow each other is told in ../README.md, the mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "attention.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_STAGE: which stage this is, see `Stage`.
// CUPYMLA_CLUSTER: CTAs that share a query, 1 or 2. CUPYMLA_PARTIALS: 1 where every slot's dKV row is stored on
// its own. The last two are for the attention stage.

namespace cupymla::sparse_mla_bwd {

using ThisConfig = Config<CUPYMLA_D_QK, CUPYMLA_CLUSTER, CUPYMLA_PARTIALS>;
using ThisStorage = Storage<ThisConfig>;

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
constexpr unsigned kStageThreads = kIsAttention ? ThisConfig::kThreads : kCompanionThreads[CUPYMLA_STAGE];
constexpr unsigned kStageCluster = kIsAttention ? ThisConfig::kCluster : 1;
constexpr unsigned kStageRegisters = kIsAttention ? ThisConfig::kWarpgroupRegisters : 0;  // where setmaxnreg is used
constexpr unsigned kStageSmemBytes = kIsAttention              ? sizeof(ThisStorage)
                                     : CUPYMLA_STAGE == kSort ? sizeof(MergeStorage<1>)
                                                               : 0;  // dynamic

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kStageThreads, 1)
    sparse_mla_bwd(
#if CUPYMLA_STAGE == 0
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
#endif
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using cupymla::Element;
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
#if CUPYMLA_STAGE == 0
  attention<ThisConfig, Element>(*reinterpret_cast<ThisStorage*>(shared_memory), params, q_map, dout_map);
#else
  if constexpr (CUPYMLA_STAGE == kSort) {
    sort(*reinterpret_cast<MergeStorage<1>*>(shared_memory), params);
  } else {
    companion<CUPYMLA_STAGE, CUPYMLA_D_QK, Element>(params);
  }
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kStageThreads,
                     cluster = cupymla::sparse_mla_bwd::kStageCluster,
                     smem_bytes = cupymla::sparse_mla_bwd::kStageSmemBytes,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     pass_heads = CUPYMLA_CLUSTER * cupymla::sparse_mla_bwd::ThisConfig::kHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::kStageRegisters);
