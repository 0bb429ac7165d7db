// Sparse MLA attention, gradients: adds each token's rows, which a cluster or two phases have packed, in the order of
// entries, for Hopper.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../sum_packed_rows.cuh"

// CUPYMLA_D_QK: 576 or 512.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kPackedSumThreads, 12)
    sparse_mla_bwd_cluster_sum(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::sum_packed_rows<CUPYMLA_D_QK>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kPackedSumThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
