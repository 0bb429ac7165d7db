// The selection of index scores that paged_indexer_logits has left in the workspace: topk's, of as many keys as each
// query sees, with the log-sum-exp of what is selected, and ids that are slots of the cache where that is wanted.
//
// CUPYMLA_SHORT: scores of a thread that keeps them; 0 for longer rows. CUPYMLA_CLUSTER: whether the CTAs of a cluster
// keep a row together.
#define CUPYMLA_SCORES 0
#include "../../common/entry.cuh"
#if CUPYMLA_SHORT
#include "short_selection.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    paged_indexer_topk(const __grid_constant__ cupymla::paged_indexer::SelectionParameters params) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  cupymla::paged_indexer::select_short_row(shared_memory, params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::topk::ShortStorage),
                     parameter_bytes = sizeof(cupymla::paged_indexer::SelectionParameters));

#else
#include "../../common/grid_dependency.cuh"
#include "../../topk/sm80/lse.cuh"
#include "../../topk/sm80/select_row.cuh"
#include "lengths.cuh"

namespace cupymla::paged_indexer {

// Positions in a request become slots. A selected key's block is in the cache.
__device__ __forceinline__ void map_to_slots(const Paged& paged, const topk::Thread& thread, int64_t request,
                                             int32_t* ids, uint32_t count) {
  const int32_t* table = paged.block_tables + request * paged.tables_request;
  const uint32_t page = static_cast<uint32_t>(paged.page);
#pragma unroll 4
  for (uint32_t i = thread.index; i < count; i += thread.threads) {
    const uint32_t position = static_cast<uint32_t>(ids[i]);
    const uint32_t block = static_cast<uint32_t>(table[position / page * paged.tables_block]);
    ids[i] = static_cast<int32_t>(block * page + position % page);
  }
}

}  // namespace cupymla::paged_indexer

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    paged_indexer_topk(const __grid_constant__ cupymla::paged_indexer::SelectionParameters params) {
  using namespace cupymla;
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Thread thread;
  const Place place(params);
  // What no kernel of the call writes may be read before those that score have ended: see short_selection.cuh.
  const int32_t seen = paged_indexer::seen_keys(params.paged, place.batch, static_cast<int32_t>(place.row));
  // Scores are there from here on.
  griddepcontrol_wait();
  const Row row(Row::scores_of(params, place.batch, place.row), seen);
  const uint32_t count = write_row(storage, thread, params, arrays, row, place);
  if (part_of_row() != 0) return;
  int32_t* ids = params.indices + place.batch * params.indices_batch + place.row * params.indices_row;
  // A thread looks at the same ids below as here.
  if (params.lse != nullptr) {
    const float lse = selected_lse(storage, thread, row, ids, count, params.lse_base2 != 0);
    if (thread.index == 0) params.lse[place.batch * params.lse_batch + place.row * params.lse_row] = lse;
  }
  if (params.slots != 0) paged_indexer::map_to_slots(params.paged, thread, place.batch, ids, count);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(cupymla::paged_indexer::SelectionParameters));

#endif
