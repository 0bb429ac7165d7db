// Gradients of the lightning indexer at the selected keys, for Hopper: stage `gradients`. README.md has the roofline,
// gradients.cuh the pipeline.
#include "../../common/entry.cuh"
#include "gradients.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_D: channels, 64 or 128. CUPYMLA_HEADS: heads of a block, with those
// that only fill up, 16, 32 or 64. CUPYMLA_DETERMINISTIC: 1 for sums of integers, 0 of floats.

extern "C" __global__ void __launch_bounds__(cupymla::indexer_bwd::kThreads, 2)
    indexer_bwd(const __grid_constant__ cupymla::indexer_bwd::Parameters params) {
  using namespace cupymla::indexer_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const Query query(params);
  Gradients{*reinterpret_cast<Storage*>(shared_memory), params, query}.run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_bwd::kThreads, smem_bytes = sizeof(cupymla::indexer_bwd::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_bwd::Parameters));
