// Sparse MLA attention, gradients: dKV from its fp32 sums, whose columns lie in runs, for Hopper.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/types.cuh"
#include "runs.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: dkv's type, 2 for fp32, 1 for fp16, 0 for bf16.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kRowThreads, 1)
    sparse_mla_bwd_round(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using Rounded = cupymla::conditional_t<CUPYMLA_FP16 == 2, float, cupymla::Element>;
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::round_runs<CUPYMLA_D_QK, Rounded>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kRowThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
