// Gradients of the lightning indexer: stage `round` makes dk of the sums, for Hopper.
#include "../../common/entry.cuh"
#include "dk_rows.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D: channels, 64 or 128. CUPYMLA_DETERMINISTIC: 1 for sums of integers, 0 of floats.

extern "C" __global__ void __launch_bounds__(cupymla::indexer_bwd::kRowThreads, 2)
    indexer_bwd_round(const __grid_constant__ cupymla::indexer_bwd::Parameters params) {
  cupymla::indexer_bwd::round<CUPYMLA_DETERMINISTIC != 0>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_bwd::kRowThreads, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::indexer_bwd::Parameters));
