// The entries of each batch entry by the token that they name, for Hopper and newer: where each token's list ends, and
// the lists, in chance order (common/entry_lists.cuh). What is computed: `invert_indices` in
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

// The chunk of queries is a batch entry, blockIdx.y.
struct BatchChunk {
  enum : uint32_t { first_query = 0 };
  const Parameters& params;
  const uint32_t queries;

  __device__ __forceinline__ explicit BatchChunk(const Parameters& params)
      : params(params), queries(static_cast<uint32_t>(params.s_q)) {}

  __device__ __forceinline__ uint32_t kv_rows() const { return static_cast<uint32_t>(params.s_kv); }

  __device__ __forceinline__ UnmaskedQuery query(uint32_t number) const {
    const int32_t batch = static_cast<int32_t>(blockIdx.y), own = static_cast<int32_t>(number);
    return {batch, own, length_of(params, batch, own), kv_rows()};
  }

  __device__ __forceinline__ int32_t first_row(const UnmaskedQuery&) const { return 0; }

  // Where a token's list ends is where the next one's begins.
  __device__ __forceinline__ int32_t* row_ends() const {
    return params.offsets + blockIdx.y * params.offsets_batch + 1;
  }

  __device__ __forceinline__ int32_t* entry_list() const {
    return params.scattered + static_cast<int64_t>(blockIdx.y) * all_entries(params);
  }

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
  const invert_indices::BatchChunk chunk(params);
  EntryLists(*reinterpret_cast<ListStorage*>(shared_memory), chunk).run();
  if (blockIdx.x == 0 && threadIdx.x == 0) chunk.row_ends()[-1] = 0;
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::kListThreads, cluster = cupymla::kListCtas,
                     smem_bytes = sizeof(cupymla::ListStorage), range_rows = cupymla::kMostRangeRows,
                     parameter_bytes = sizeof(cupymla::invert_indices::Parameters));
