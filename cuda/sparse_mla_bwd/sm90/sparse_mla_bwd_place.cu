// Sparse MLA attention, gradients: lists entries by the token that they name, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../entry_lists.cuh"

// CUPYMLA_CHUNKS: 1 where lists are made for several chunks of queries at once, else 0.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kListThreads, 1)
    sparse_mla_bwd_place(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::place_entries<CUPYMLA_CHUNKS>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kListThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
