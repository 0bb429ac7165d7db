// The selection of index scores that cuda/indexer_logits has left in the workspace: topk's, with the causal limit and
// the log-sum-exp of what is selected. README.md has the chunks of rows in which both kernels run.
//
// CUPYMLA_SHORT: scores of a thread that keeps them; 0 for longer rows. CUPYMLA_CLUSTER: whether the CTAs of a cluster
// keep a row together.
#define CUPYMLA_SCORES 0
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/indexer_score.cuh"
#if CUPYMLA_SHORT
#include "../../topk/sm80/short_lse.cuh"
#else
#include "../../topk/sm80/lse.cuh"
#include "../../topk/sm80/select_row.cuh"
#endif
#include "params.cuh"

namespace cupymla::indexer_topk {

// How many columns a row may see.
__device__ __forceinline__ int32_t limit_of(const Parameters& params, int64_t row) {
  return params.causal == 0 ? params.columns
                            : indexer::causal_end(params.q_start, row, params.k_stride, params.columns);
}

}  // namespace cupymla::indexer_topk

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    indexer_topk(const __grid_constant__ cupymla::indexer_topk::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  wait_for_primary_grid(params.has_dependent != 0);
  const Thread thread;
#if CUPYMLA_SHORT
  uint32_t* bins = short_bins(shared_memory);
  clear_own_bins(thread, bins);
  Exchange exchange(*reinterpret_cast<ShortStorage*>(shared_memory), thread);
  const uint32_t place = exchange.row();
  const uint32_t batch = place / static_cast<uint32_t>(params.rows);
  const uint32_t number = place % static_cast<uint32_t>(params.rows);
  const Row row(params, batch, number, indexer_topk::limit_of(params, number));
  const Columns columns(thread, row, exchange.rank, exchange.parts);
  OwnScores scores(thread, bins);
  LoadedScores(row, columns).keep(scores);
  exchange.begin();
  const ShortSelection selection =
      write_short(exchange, bins, params, row, columns, scores, batch, number, ColumnIds{columns});
  if (params.lse == nullptr) return;
  const float lse = short_lse(exchange, columns, scores, selection, params.lse_base2 != 0);
  if (exchange.rank == 0 && thread.index == 0) params.lse[batch * params.lse_batch + number * params.lse_row] = lse;
#else
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Place place(params);
  const Row row(params, place.batch, place.row, indexer_topk::limit_of(params, place.row));
  const uint32_t count = write_row(storage, thread, params, arrays, row, place);
  if (params.lse == nullptr || part_of_row() != 0) return;
  const int32_t* columns = params.indices + place.batch * params.indices_batch + place.row * params.indices_row;
  const float lse = selected_lse(storage, thread, row, columns, count, params.lse_base2 != 0);
  if (thread.index == 0) params.lse[place.batch * params.lse_batch + place.row * params.lse_row] = lse;
#endif
}

#if CUPYMLA_SHORT
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::topk::ShortStorage),
                     parameter_bytes = sizeof(cupymla::indexer_topk::Parameters));
#else
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_topk::Parameters));
#endif
