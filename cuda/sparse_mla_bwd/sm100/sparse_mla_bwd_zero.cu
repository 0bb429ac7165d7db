// Sparse MLA attention, gradients: clears fp32 sums of dKV, and the distribution, for Blackwell.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../dkv_rows.cuh"

// CUPYMLA_D_QK: 576 or 512.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kRowThreads, 1)
    sparse_mla_bwd_zero(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::zero<CUPYMLA_D_QK>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kRowThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
