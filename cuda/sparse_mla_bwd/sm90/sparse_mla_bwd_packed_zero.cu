// Sparse MLA attention, gradients: clears fp32 sums of dKV, with spare rows, and the distribution, and marks rows
// of kv that packed queries have to take with care, for Hopper.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../merge.cuh"
#include "runs.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kRowThreads, 1)
    sparse_mla_bwd_packed_zero(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::zero<CUPYMLA_D_QK>(params);
  cupymla::sparse_mla_bwd::zero_spare_rows<CUPYMLA_D_QK>(params);
  cupymla::sparse_mla_bwd::mark_non_finite_rows<CUPYMLA_D_QK, cupymla::Element>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kRowThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
