// Sparse MLA attention, gradients: the attention of a 2-CTA cluster to a query, for Blackwell.
// The mathematics are in cupymla/ops/sparse_mla_bwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "attention.cuh"
#include "small_head_attention.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_HEADS: heads of one head block, 128, or 64
// where no query has more. CUPYMLA_PARTIALS: 1 where every entry's dKV row is stored on its own.

namespace cupymla::sparse_mla_bwd {

#if CUPYMLA_HEADS == 64
using ThisConfig = SmallHead<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = SmallHeadStorage<ThisConfig>;
#else
using ThisConfig = ManyHeads<CUPYMLA_D_QK, CUPYMLA_PARTIALS>;
using ThisStorage = Storage<ThisConfig>;
#endif
static_assert(CUPYMLA_HEADS == ThisConfig::kHeads);

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::ThisConfig::kThreads, 1)
    sparse_mla_bwd(
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
        const __grid_constant__ cupymla::TensorMap kv_map,
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  attention<ThisConfig, cupymla::Element, CUPYMLA_FP16>(*reinterpret_cast<ThisStorage*>(shared_memory), params, q_map,
                                                        dout_map, kv_map);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::ThisConfig::kThreads,
                     cluster = cupymla::sparse_mla_bwd::ThisConfig::kCluster,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     block_heads = cupymla::sparse_mla_bwd::ThisConfig::kHeads,
                     tmem_columns = cupymla::sparse_mla_bwd::ThisConfig::kTmemColumns);
