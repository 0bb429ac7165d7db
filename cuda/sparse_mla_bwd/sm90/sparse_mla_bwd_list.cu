// Sparse MLA attention, gradients: lists entries by the token that they name, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../entry_lists.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kListThreads, 2)
    sparse_mla_bwd_list(const __grid_constant__ cupymla::sparse_mla_bwd::ListParameters params) {
  using namespace cupymla::sparse_mla_bwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const ListChunk chunk(params);
  cupymla::EntryLists(*reinterpret_cast<ListStorage*>(shared_memory), chunk).run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kListThreads, cluster = cupymla::sparse_mla_bwd::kListCtas,
                     smem_bytes = sizeof(cupymla::sparse_mla_bwd::ListStorage),
                     range_rows = cupymla::sparse_mla_bwd::kMostRangeRows,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::ListParameters));
