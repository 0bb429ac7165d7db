// Sparse MLA attention, gradients: which rows neighbouring queries have in all, and which of them each has, for
// Hopper.
#include "../../common/entry.cuh"
#include "../merge.cuh"

// CUPYMLA_QUERIES: how many queries are packed, 2 (of up to 32 heads) or 4 (of up to 16). CUPYMLA_FIXED_ORDER: 1 where
// row entries of tokens that a query names once more have an order too, else 0.

namespace cupymla::sparse_mla_bwd {

constexpr unsigned kCtas = 2;  // of a multiprocessor, at least
using ThisStorage = MergeStorage<CUPYMLA_QUERIES>;

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kMergeThreads, cupymla::sparse_mla_bwd::kCtas)
    sparse_mla_bwd_merge(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  merge<CUPYMLA_QUERIES, CUPYMLA_FIXED_ORDER>(*reinterpret_cast<ThisStorage*>(shared_memory), params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kMergeThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
