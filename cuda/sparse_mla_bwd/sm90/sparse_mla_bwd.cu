// Sparse MLA attention, gradients, for Hopper: one stage of the backward for each value of CUPYMLA_STAGE. How the
// stages follow each other is told in ../README.md, the mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "attention.cuh"
#include "halves.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_STAGE: which stage this is, see `Stage`.
// CUPYMLA_CLUSTER: CTAs that share a query, 1 or 2. CUPYMLA_PARTIALS: 1 where every slot's dKV row is stored on
// its own. The last two are for the attention stage.

namespace cupymla::sparse_mla_bwd {

using ThisConfig = Config<CUPYMLA_D_QK, CUPYMLA_CLUSTER, CUPYMLA_PARTIALS>;
using ThisHalves = HalvesConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
constexpr bool kIsHalves = CUPYMLA_STAGE == kHalves;
constexpr unsigned kStageThreads = kIsAttention ? ThisConfig::kThreads
                                   : kIsHalves  ? ThisHalves::kThreads
                                                : kCompanionThreads[CUPYMLA_STAGE];
constexpr unsigned kStageCluster = kIsAttention ? ThisConfig::kCluster : kIsHalves && CUPYMLA_CLUSTERED ? ThisHalves::kCluster : 1;
constexpr unsigned kStageRegisters = kIsAttention ? ThisConfig::kWarpgroupRegisters  // where setmaxnreg is used
                                     : kIsHalves  ? ThisHalves::kWarpgroupRegisters
                                                  : 0;
constexpr unsigned kStageHeads = kIsHalves ? ThisHalves::kHeads : ThisConfig::kCluster * ThisConfig::kHeads;
constexpr unsigned kStageSmemBytes = kIsAttention             ? sizeof(Storage<ThisConfig>)
                                     : kIsHalves              ? ThisHalves::kSmemBytes
                                     : CUPYMLA_STAGE == kSort ? sizeof(MergeStorage<1>)
                                                              : 0;  // dynamic

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kStageThreads, 1)
    sparse_mla_bwd(
#if CUPYMLA_STAGE == 0 || CUPYMLA_STAGE == 12
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
#endif
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using cupymla::Element;
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
#if CUPYMLA_STAGE == 0
  attention<ThisConfig, Element>(*reinterpret_cast<Storage<ThisConfig>*>(shared_memory), params, q_map, dout_map);
#elif CUPYMLA_STAGE == 12
  halves<ThisHalves, Element>(shared_memory, params, q_map, dout_map);
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
                     pass_heads = cupymla::sparse_mla_bwd::kStageHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::kStageRegisters);
