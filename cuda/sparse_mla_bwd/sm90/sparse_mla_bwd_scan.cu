// Sparse MLA attention, gradients: where each token's part of the list of entries begins, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../entry_lists.cuh"

// CUPYMLA_CHUNKS: 1 where lists are made for several chunks of queries at once, else 0.

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kScanThreads, 1)
    sparse_mla_bwd_scan(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  cupymla::sparse_mla_bwd::scan_rows<CUPYMLA_CHUNKS>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kScanThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
