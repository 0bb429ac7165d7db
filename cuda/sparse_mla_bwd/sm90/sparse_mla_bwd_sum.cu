// Sparse MLA attention, gradients: adds each token's stored fp32 rows in the order of entries, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../sum_rows.cuh"

// CUPYMLA_D_QK: 576 or 512.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kSumThreads, 1)
    sparse_mla_bwd_sum(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::sum_rows<CUPYMLA_D_QK>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kSumThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
