// Gradients of the lightning indexer: stage `total`, ahead of sums of integers, for Hopper.
#include "../../common/entry.cuh"
#include "total.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

extern "C" __global__ void __launch_bounds__(cupymla::indexer_bwd::kThreads, 2)
    indexer_bwd_total(const __grid_constant__ cupymla::indexer_bwd::Parameters params) {
  cupymla::indexer_bwd::total(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_bwd::kThreads, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::indexer_bwd::Parameters));
