// Sparse MLA attention, gradients: each query's valid tokens in their order, for Hopper.
#include "../../common/entry.cuh"
#include "../token_order.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kMergeThreads, 1)
    sparse_mla_bwd_sort(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  sort(*reinterpret_cast<MergeStorage<1>*>(shared_memory), params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kMergeThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd::MergeStorage<1>),
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
