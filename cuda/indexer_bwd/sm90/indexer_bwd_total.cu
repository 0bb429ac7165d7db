// Gradients of the lightning indexer: stage `total`, ahead of sums of integers, for Hopper.
#include "../../common/entry.cuh"
#include "total.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

extern "C" __global__ void __launch_bounds__(cupymla::indexer_bwd::kTotalThreads, 1)
    indexer_bwd_total(const __grid_constant__ cupymla::indexer_bwd::Parameters params) {
  using namespace cupymla::indexer_bwd;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Totals{*reinterpret_cast<TotalStorage*>(shared_memory), params}.run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_bwd::kTotalThreads,
                     smem_bytes = sizeof(cupymla::indexer_bwd::TotalStorage),
                     parameter_bytes = sizeof(cupymla::indexer_bwd::Parameters));
