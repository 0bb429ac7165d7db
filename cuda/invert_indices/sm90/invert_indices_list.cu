// The entries of each chunk of queries by the token that they name, for Hopper and newer: where each token's list ends,
// and the lists, in chance order (common/entry_lists.cuh). What is computed: `invert_indices` in
// cupymla/ops/invert_indices/reference.py.
#include "../../common/entry.cuh"
#include "../../common/entry_lists.cuh"
#include "../../common/grid_dependency.cuh"
#include "params.cuh"

namespace cupymla::invert_indices {

// A query that nothing is masked for but by its length.
struct UnmaskedQuery {
  int32_t batch, query, entries;
  uint32_t token_limit;
};

// blockIdx.y counts chunks of all batch entries.
struct QueryChunk {
  const Parameters& params;
  const int32_t batch;
  const uint32_t chunk, first_query, queries;

  __device__ __forceinline__ explicit QueryChunk(const Parameters& params)
      : params(params),
        batch(static_cast<int32_t>(blockIdx.y / params.chunks)),
        chunk(blockIdx.y % params.chunks),
        first_query(first_query_of(params, chunk)),
        queries(queries_of(params, chunk)) {}

  __device__ __forceinline__ uint32_t kv_rows() const { return static_cast<uint32_t>(params.s_kv); }

  __device__ __forceinline__ UnmaskedQuery query(uint32_t number) const {
    const int32_t own = static_cast<int32_t>(number);
    return {batch, own, length_of(params, batch, own), kv_rows()};
  }

  __device__ __forceinline__ int32_t first_row(const UnmaskedQuery&) const { return 0; }

  __device__ __forceinline__ int32_t* row_ends() const { return row_ends_of(params, batch, chunk); }

  __device__ __forceinline__ int32_t* entry_list() const { return scattered_of(params, batch, first_query); }

  // There is no kernel of the call before this one.
  __device__ __forceinline__ void wait() const {
    if (params.has_dependent != 0) griddepcontrol_launch_dependents();
  }
};

}  // namespace cupymla::invert_indices

extern "C" __global__ void __launch_bounds__(cupymla::kListThreads, 2)
    invert_indices_list(const __grid_constant__ cupymla::invert_indices::Parameters params) {
  using namespace cupymla;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const invert_indices::QueryChunk chunk(params);
  EntryLists(*reinterpret_cast<ListStorage*>(shared_memory), chunk).run();
  // Where a token's list ends is where the next one's begins: row ends of one chunk are offsets, but for the first.
  if (params.chunks == 1 && blockIdx.x == 0 && threadIdx.x == 0) chunk.row_ends()[-1] = 0;
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::kListThreads, cluster = cupymla::kListCtas,
                     smem_bytes = sizeof(cupymla::ListStorage), range_rows = cupymla::kMostRangeRows,
                     parameter_bytes = sizeof(cupymla::invert_indices::Parameters));
