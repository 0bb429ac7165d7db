// Sparse MLA attention, gradients, for Hopper, deterministic, up to 64 heads: one CTA stores each entry's row of dKV,
// packed, for sums in a fixed order. Of few heads neighbouring queries are packed, so that a row is stored once that
// several of them have. One stage of the backward for each value of CUPYMLA_STAGE; how they follow each other is told
// in ../README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../merge.cuh"
#include "../stages.cuh"
#include "../sum_group_rows.cuh"
#include "attention.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_STAGE: which stage this is, see `Stage`.
// CUPYMLA_QUERIES: how many queries are packed: 1 (of up to 64 heads), 2 (32) or 4 (16).

namespace cupymla::sparse_mla_bwd {

using ThisConfig = Config<CUPYMLA_D_QK, true, CUPYMLA_QUERIES, true>;
using ThisStorage = Storage<ThisConfig>;
using ThisMergeStorage = MergeStorage<CUPYMLA_QUERIES>;

constexpr bool kIsAttention = CUPYMLA_STAGE == kAttention;
static_assert(kIsAttention || CUPYMLA_STAGE == kSum || (CUPYMLA_STAGE == kMerge && CUPYMLA_QUERIES > 1),
              "other stages are those of queries whose rows are not stored");
constexpr unsigned kStageThreads = kIsAttention              ? ThisConfig::kThreads
                                   : CUPYMLA_STAGE == kMerge ? kMergeThreads
                                                             : kPackedSumThreads;
// Of a multiprocessor, at least; of sums so many that memory has enough to bring.
constexpr unsigned kStageCtas = CUPYMLA_STAGE == kMerge ? 2 : CUPYMLA_STAGE == kSum ? 12 : 1;
constexpr unsigned kStageRegisters = kIsAttention ? ThisConfig::kWarpgroupRegisters : 0;  // where setmaxnreg is used
constexpr unsigned kStageSmemBytes = kIsAttention              ? sizeof(ThisStorage)
                                     : CUPYMLA_STAGE == kMerge ? sizeof(ThisMergeStorage)
                                                                : 0;  // dynamic

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kStageThreads,
                                              cupymla::sparse_mla_bwd::kStageCtas)
    sparse_mla_bwd_stored(
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
  if constexpr (CUPYMLA_STAGE == kMerge) {
    merge<CUPYMLA_QUERIES, true>(*reinterpret_cast<ThisMergeStorage*>(shared_memory), params);
  } else {
    cupymla::wait_for_primary_grid(params.has_dependent != 0);
    if constexpr (CUPYMLA_QUERIES > 1) {
      sum_group_rows<CUPYMLA_D_QK, CUPYMLA_QUERIES>(params);
    } else {
      sum_packed_entries<CUPYMLA_D_QK>(params);
    }
  }
#endif
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kStageThreads, cluster = 1,
                     smem_bytes = cupymla::sparse_mla_bwd::kStageSmemBytes,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     block_heads = cupymla::sparse_mla_bwd::ThisConfig::kQueryHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::kStageRegisters);
