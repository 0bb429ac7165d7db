// Sparse MLA attention, gradients: clears how many entries name each token, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../entry_lists.cuh"

// CUPYMLA_CHUNKS: 1 where lists are made for several chunks of queries at once, else 0.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kListThreads, 1)
    sparse_mla_bwd_clear(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::clear_counts<CUPYMLA_CHUNKS>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kListThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
