// The indexer's warm-up towards dense attention, for Hopper: stage `round`, dk of the sums.
#include "../../common/entry.cuh"
#include "../../common/tma.cuh"
#include "keys.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D: channels of an index head, 64 or 128.

extern "C" __global__ void __launch_bounds__(cupymla::indexer_loss_dense::kRowThreads, 1)
    indexer_loss_dense_round(const __grid_constant__ cupymla::TensorMap heads_map,
                             const __grid_constant__ cupymla::TensorMap keys_map,
                             const __grid_constant__ cupymla::indexer_loss_dense::Parameters params) {
  cupymla::indexer_loss_dense::round(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_loss_dense::kRowThreads, cluster = 1,
                     smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::indexer_loss_dense::Parameters));
