// Sparse MLA attention, gradients, for Hopper: one stage of the backward for each value of CUPYMLA_STAGE. How the
// stages follow each other is told in ../README.md, the mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "../sum_packed_rows.cuh"
#include "attention.cuh"
#include "dq_dkv_kernel.cuh"
#include "cluster_attention.cuh"
#include "p_ds_kernel.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16; 2 where `round` of a cluster's sums makes fp32.
// CUPYMLA_STAGE: which stage this is, see `Stage`. CUPYMLA_CLUSTER: CTAs that share a query, 1 or 2, for the attention
// stage, and `zero` and `round` of its sums. CUPYMLA_PARTIALS: 1 where every entry's dKV row is stored on its own, for
// the attention stage; 2 where these rows are packed, for the attention stage of a cluster, `dq_dkv`, and `sum`.

namespace cupymla::sparse_mla_bwd {

#if CUPYMLA_CLUSTER == 2
using ThisConfig = ClusterConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = ClusterStorage<ThisConfig>;
#else
using ThisConfig = Config<CUPYMLA_D_QK, CUPYMLA_PARTIALS != 0>;
using ThisStorage = Storage<ThisConfig>;
#endif
using ThisPds = PdsConfig<CUPYMLA_D_QK>;
using ThisDqDkv = DqDkvConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
// A float32 dkv of a cluster comes from the order of its sums by the stage `round`.
using Rounded = conditional_t<CUPYMLA_FP16 == 2, float, Element>;

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
constexpr bool kIsPds = CUPYMLA_STAGE == kPDs, kIsDqDkv = CUPYMLA_STAGE == kDqDkv;
constexpr bool kSumsPacked = CUPYMLA_STAGE == kSum && CUPYMLA_PARTIALS == 2;
constexpr unsigned kStageThreads = kIsAttention  ? ThisConfig::kThreads
                                   : kIsPds  ? ThisPds::kThreads
                                   : kIsDqDkv  ? ThisDqDkv::kThreads
                                   : kSumsPacked ? kPackedSumThreads
                                                 : kPrePostThreads[CUPYMLA_STAGE];
constexpr unsigned kStageCluster = kIsAttention ? CUPYMLA_CLUSTER : 1;
constexpr unsigned kStageBlockHeads = (kIsPds || kIsDqDkv ? kPdsGroups : CUPYMLA_CLUSTER) * 64;
constexpr unsigned kStageRegisters = kIsAttention ? ThisConfig::kWarpgroupRegisters  // where setmaxnreg is used
                                     : kIsPds ? ThisPds::kWarpgroupRegisters
                                     : kIsDqDkv ? ThisDqDkv::kWarpgroupRegisters
                                                  : 0;
constexpr unsigned kStageSmemBytes = kIsAttention              ? sizeof(ThisStorage)
                                     : kIsPds              ? sizeof(PdsStorage<ThisPds>)
                                     : kIsDqDkv              ? sizeof(DqDkvStorage<ThisDqDkv>)
                                     : CUPYMLA_STAGE == kSort ? sizeof(MergeStorage<1>)
                                                               : 0;  // dynamic

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kStageThreads, 1)
    sparse_mla_bwd(
#if CUPYMLA_STAGE == 0 || CUPYMLA_STAGE == 12 || CUPYMLA_STAGE == 13
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
#if CUPYMLA_STAGE == 0 && CUPYMLA_CLUSTER == 2
        const __grid_constant__ cupymla::TensorMap rope_map,
#endif
#endif
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using cupymla::Element;
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
#if CUPYMLA_STAGE == 0
  attention<ThisConfig, Element>(*reinterpret_cast<ThisStorage*>(shared_memory), params, q_map, dout_map
#if CUPYMLA_CLUSTER == 2
                                 , rope_map
#endif
  );
#elif CUPYMLA_STAGE == 12
  make_p_ds<ThisPds, Element>(*reinterpret_cast<PdsStorage<ThisPds>*>(shared_memory), params, q_map,
                              dout_map);
#elif CUPYMLA_STAGE == 13
  make_dq_dkv<ThisDqDkv, Element>(*reinterpret_cast<DqDkvStorage<ThisDqDkv>*>(shared_memory), params, q_map,
                                  dout_map);
#else
  if constexpr (CUPYMLA_STAGE == kSort) {
    sort(*reinterpret_cast<MergeStorage<1>*>(shared_memory), params);
  } else if constexpr (CUPYMLA_STAGE == kRound && CUPYMLA_CLUSTER == 2) {
    cupymla::wait_for_primary_grid(params.has_dependent != 0);
    round_runs<CUPYMLA_D_QK, Rounded>(params);
  } else if constexpr (CUPYMLA_STAGE >= kClear && CUPYMLA_STAGE <= kPlace) {
    cupymla::wait_for_primary_grid(params.has_dependent != 0);
    list_entries<CUPYMLA_STAGE, true>(params);
  } else if constexpr (kSumsPacked) {
    cupymla::wait_for_primary_grid(params.has_dependent != 0);
    sum_packed_rows<CUPYMLA_D_QK>(params);
  } else {
    pre_post_process<CUPYMLA_STAGE, CUPYMLA_D_QK, Element>(params);
    if constexpr (CUPYMLA_STAGE == kZero && CUPYMLA_CLUSTER == 2) zero_spare_rows<CUPYMLA_D_QK>(params);
  }
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kStageThreads,
                     cluster = cupymla::sparse_mla_bwd::kStageCluster,
                     smem_bytes = cupymla::sparse_mla_bwd::kStageSmemBytes,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     block_heads = cupymla::sparse_mla_bwd::kStageBlockHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::kStageRegisters);
