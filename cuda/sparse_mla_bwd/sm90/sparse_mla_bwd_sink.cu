// Sparse MLA attention, gradients: d_sink from what every query adds to it, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../sink.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kSinkThreads, 1)
    sparse_mla_bwd_sink(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::sum_sink_terms(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kSinkThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
