// Sparse MLA attention, gradients: adds each token's rows, which one CTA has packed, in the order of entries, or of
// packed queries in that of query groups, for Hopper.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../sum_group_rows.cuh"

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_QUERIES: how many queries are packed: 1 (of up to 64 heads), 2 (32) or 4 (16).

namespace cupymla::sparse_mla_bwd {

constexpr unsigned kCtas = 12;  // of a multiprocessor, at least: so many that memory has enough to bring

}  // namespace cupymla::sparse_mla_bwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kPackedSumThreads, cupymla::sparse_mla_bwd::kCtas)
    sparse_mla_bwd_stored_sum(const __grid_constant__ cupymla::sparse_mla_bwd::Parameters params) {
  using namespace cupymla::sparse_mla_bwd;
  cupymla::wait_for_primary_grid(params.has_dependent != 0);
  if constexpr (CUPYMLA_QUERIES > 1) {
    sum_group_rows<CUPYMLA_D_QK, CUPYMLA_QUERIES>(params);
  } else {
    sum_packed_entries<CUPYMLA_D_QK>(params);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kPackedSumThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::Parameters));
