// Sparse MLA attention, gradients, for Hopper: the attention of 65 to 128 heads in two stages. `weights` makes P and dS
// and stores them, `columns` makes dQ and dKV of them. How stages follow each other is told in ../README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../stages.cuh"
#include "columns_stage.cuh"
#include "weights_stage.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_STAGE: which stage this is, see `Stage`.
// CUPYMLA_PARTIALS: 2 where every slot's dKV row is stored on its own, packed, for the stage `columns`.

namespace cupymla::sparse_mla_bwd {

constexpr bool kIsWeights = CUPYMLA_STAGE == kWeights;
static_assert(kIsWeights || CUPYMLA_STAGE == kColumns, "no such stage");
using ThisWeights = WeightsConfig<CUPYMLA_D_QK>;
using ThisColumns = ColumnsConfig<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
static_assert(ThisWeights::kThreads == ThisColumns::kThreads);

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::ThisWeights::kThreads, 1)
    sparse_mla_bwd_halves(const __grid_constant__ cupymla::TensorMap q_map,
                          const __grid_constant__ cupymla::TensorMap dout_map,
                          const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using cupymla::Element;
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  if constexpr (kIsWeights) {
    make_weights<ThisWeights, Element>(*reinterpret_cast<WeightsStorage<ThisWeights>*>(shared_memory), params, q_map,
                                       dout_map);
  } else {
    make_columns<ThisColumns, Element>(*reinterpret_cast<ColumnsStorage<ThisColumns>*>(shared_memory), params, q_map,
                                       dout_map);
  }
}

CUPYMLA_LAUNCH_FACTS(
    threads = cupymla::sparse_mla_bwd::ThisWeights::kThreads, cluster = 1,
    smem_bytes = cupymla::sparse_mla_bwd::kIsWeights
                     ? sizeof(cupymla::sparse_mla_bwd::WeightsStorage<cupymla::sparse_mla_bwd::ThisWeights>)
                     : sizeof(cupymla::sparse_mla_bwd::ColumnsStorage<cupymla::sparse_mla_bwd::ThisColumns>),
    parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
    pass_heads = cupymla::sparse_mla_bwd::kWeightGroups * cupymla::sparse_mla_bwd::kWeightHeads,
    warpgroup_registers = cupymla::sparse_mla_bwd::kIsWeights
                              ? cupymla::sparse_mla_bwd::ThisWeights::kWarpgroupRegisters
                              : cupymla::sparse_mla_bwd::ThisColumns::kWarpgroupRegisters);
