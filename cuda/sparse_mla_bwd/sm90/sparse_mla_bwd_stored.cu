// Sparse MLA attention, gradients: the attention of up to 64 heads, deterministic, for Hopper. One CTA stores each
// entry's row of dKV, packed, for sums in a fixed order. Of few heads neighbouring queries are packed, so that a row is
// stored once that several of them have.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "attention.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_QUERIES: how many queries are packed: 1
// (of up to 64 heads), 2 (32) or 4 (16).

namespace cupymla::sparse_mla_bwd {

using ThisConfig = Config<CUPYMLA_D_QK, true, CUPYMLA_QUERIES, true>;
using ThisStorage = Storage<ThisConfig>;

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::ThisConfig::kThreads, 1)
    sparse_mla_bwd_stored(
        const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap dout_map,
        const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  attention<ThisConfig, cupymla::Element>(*reinterpret_cast<ThisStorage*>(shared_memory), params, q_map, dout_map);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters),
                     block_heads = cupymla::sparse_mla_bwd::ThisConfig::kQueryHeads,
                     warpgroup_registers = cupymla::sparse_mla_bwd::ThisConfig::kWarpgroupRegisters);
