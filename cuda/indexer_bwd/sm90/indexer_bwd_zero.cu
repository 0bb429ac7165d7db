// Gradients of the lightning indexer: stage `zero` makes the workspace ready, for Hopper.
#include "../../common/entry.cuh"
#include "params.cuh"
#include "rows.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

extern "C" __global__ void __launch_bounds__(cupymla::indexer_bwd::kRowThreads, 2)
    indexer_bwd_zero(const __grid_constant__ cupymla::indexer_bwd::Parameters params) {
  using namespace cupymla::indexer_bwd;
  for (int64_t chunk = first_thread(); chunk < params.zeroed_chunks; chunk += all_threads()) {
    reinterpret_cast<uint4*>(params.sums)[chunk] = make_uint4(0, 0, 0, 0);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_bwd::kRowThreads, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::indexer_bwd::Parameters));
