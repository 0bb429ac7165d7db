// Sparse MLA attention, gradients, for Hopper: one stage of the backward for each value of CUPYMLA_STAGE. How the
// stages follow each other is told in ../README.md, the mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "../sum_packed_rows.cuh"
#include "attention.cuh"
#include "columns_stage.cuh"
#include "pair_attention.cuh"
#include "weights_stage.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16; 2 where `round` of a pair's sums makes fp32.
// CUPYMLA_STAGE: which stage this is, see `Stage`. CUPYMLA_CLUSTER: CTAs that share a query, 1 or 2, for the attention
// stage, and `zero` and `round` of its sums. CUPYMLA_PARTIALS: 1 where every slot's dKV row is stored on its own, for
// the attention stage; 2 where these rows are packed, for the attention stage of a pair, `columns`, and `sum`.

namespace cupymla::sparse_mla_bwd {

#if CUPYMLA_CLUSTER == 2
using ThisConfig = PairConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = PairStorage<ThisConfig>;
#else
using ThisConfig = Config<CUPYMLA_D_QK, CUPYMLA_PARTIALS != 0>;
using ThisStorage = Storage<ThisConfig>;
#endif
using ThisWeights = WeightsConfig<CUPYMLA_D_QK>;
using ThisColumns = ColumnsConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
// A float32 dkv of a pair comes from the order of its sums by the stage `round`.
using Rounded = conditional_t<CUPYMLA_FP16 == 2, float, Element>;

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
constexpr bool kIsWeights = CUPYMLA_STAGE == kWeights, kIsColumns = CUPYMLA_STAGE == kColumns;
constexpr bool kSumsPacked = CUPYMLA_STAGE == kSum && CUPYMLA_PARTIALS == 2;
constexpr unsigned kStageThreads = kIsAttention  ? ThisConfig::kThreads
                                   : kIsWeights  ? ThisWeights::kThreads
                                   : kIsColumns  ? ThisColumns::kThreads
                                   : kSumsPacked ? kPackedSumThreads
                                                 : kCompanionThreads[CUPYMLA_STAGE];
constexpr unsigned kStageCluster = kIsAttention ? CUPYMLA_CLUSTER : 1;
constexpr unsigned kStagePassHeads = (kIsWeights || kIsColumns ? kWeightGroups : CUPYMLA_CLUSTER) * 64;
constexpr unsigned kStageRegisters = kIsAttention ? ThisConfig::kWarpgroupRegisters  // where setmaxnreg is used
                                     : kIsWeights ? ThisWeights::kWarpgroupRegisters
                                     : kIsColumns ? ThisColumns::kWarpgroupRegisters
                                                  : 0;
constexpr unsigned kStageSmemBytes = kIsAttention              ? sizeof(ThisStorage)
                                     : kIsWeights              ? sizeof(WeightsStorage<ThisWeights>)
                                     : kIsColumns              ? sizeof(ColumnsStorage<ThisColumns>)
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
  make_weights<ThisWeights, Element>(*reinterpret_cast<WeightsStorage<ThisWeights>*>(shared_memory), params, q_map,
                                     dout_map);
#elif CUPYMLA_STAGE == 13
  make_columns<ThisColumns, Element>(*reinterpret_cast<ColumnsStorage<ThisColumns>*>(shared_memory), params, q_map,
                                     dout_map);
#else
  if constexpr (CUPYMLA_STAGE == kSort) {
    sort(*reinterpret_cast<MergeStorage<1>*>(shared_memory), params);
  } else if constexpr (CUPYMLA_STAGE == kRound && CUPYMLA_CLUSTER == 2) {
    cupymla::wait_for_grid_ahead(params.followed != 0);
    round_runs<CUPYMLA_D_QK, Rounded>(params);
  } else if constexpr (CUPYMLA_STAGE >= kClear && CUPYMLA_STAGE <= kPlace) {
    cupymla::wait_for_grid_ahead(params.followed != 0);
    list_slots<CUPYMLA_STAGE, true>(params);
  } else if constexpr (kSumsPacked) {
    cupymla::wait_for_grid_ahead(params.followed != 0);
    sum_packed_rows<CUPYMLA_D_QK>(params);
  } else {
    companion<CUPYMLA_STAGE, CUPYMLA_D_QK, Element>(params);
    if constexpr (CUPYMLA_STAGE == kZero && CUPYMLA_CLUSTER == 2) zero_spare_rows<CUPYMLA_D_QK>(params);
  }
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kStageThreads,
                     cluster = cupymla::sparse_mla_bwd::kStageCluster,
                     smem_bytes = cupymla::sparse_mla_bwd::kStageSmemBytes,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     pass_heads = cupymla::sparse_mla_bwd::kStagePassHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::kStageRegisters);
