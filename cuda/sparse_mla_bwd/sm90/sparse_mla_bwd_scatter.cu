// Sparse MLA attention, gradients: the distribution from the order of tokens to top-k entries, for Hopper.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../token_order.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kScatterThreads, 1)
    sparse_mla_bwd_scatter(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::scatter_distribution(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kScatterThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
