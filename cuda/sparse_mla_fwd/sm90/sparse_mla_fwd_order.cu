// Sparse MLA attention, forward: the pre-processing kernel that puts entries into the order of tokens, for Hopper.
#include "../../common/entry.cuh"
#include "token_order.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_fwd::kOrderThreads)
    sparse_mla_fwd_order(const __grid_constant__ cupymla::sparse_mla_fwd::OrderParameters params) {
  using namespace cupymla::sparse_mla_fwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  TokenOrder(*reinterpret_cast<OrderStorage*>(shared_memory), params).run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_fwd::kOrderThreads, cluster = 1,
                     // And so many more for each word of a token's bit, in groups of words.
                     smem_bytes = sizeof(cupymla::sparse_mla_fwd::OrderStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_fwd::OrderParameters),
                     word_bytes = cupymla::sparse_mla_fwd::kOrderWordBytes,
                     word_group = cupymla::sparse_mla_fwd::kOrderWordGroup);
