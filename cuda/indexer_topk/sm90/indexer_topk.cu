// The selection of index scores that cuda/indexer_logits has left in the workspace: topk's, with the causal limit and
// the log-sum-exp of what is selected. README.md has the chunks of rows in which both kernels run.
//
// CUPYMLA_STAGE: 0 the selection; 1 and 2 what comes before and behind scores that are filtered (thresholds.cuh,
// candidates.cuh); 3 the selection in flagged rows. CUPYMLA_SHORT: scores of a thread that keeps them; 0 for longer
// rows. CUPYMLA_CLUSTER: whether the CTAs of a cluster keep a row together.
#define CUPYMLA_SCORES 0
#ifndef CUPYMLA_STAGE
#define CUPYMLA_STAGE 0
#endif
#include "../../common/entry.cuh"
#if CUPYMLA_STAGE == 1
#include "thresholds.cuh"
#elif CUPYMLA_STAGE == 2
#include "candidates.cuh"
#elif CUPYMLA_SHORT
#include "../../topk/sm80/short_lse.cuh"
#else
#include "../../topk/sm80/lse.cuh"
#include "../../topk/sm80/select_row.cuh"
#endif
#include "limit.cuh"

// Left to itself, ptxas makes room for two CTAs of a multiprocessor, and spills.
#if CUPYMLA_STAGE == 1 || CUPYMLA_STAGE == 2
using Parameters = cupymla::indexer_topk::FilterParameters;
#define CUPYMLA_BOUNDS __launch_bounds__(cupymla::topk::kMaxThreads, 1)
#else
using Parameters = cupymla::indexer_topk::Parameters;
#define CUPYMLA_BOUNDS __launch_bounds__(cupymla::topk::kMaxThreads)
#endif

extern "C" __global__ void CUPYMLA_BOUNDS
    indexer_topk(const __grid_constant__ Parameters params) {
  using namespace cupymla;
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
#if CUPYMLA_STAGE == 1
  indexer_topk::write_threshold(params, shared_memory);
#elif CUPYMLA_STAGE == 2
  indexer_topk::select_listed(params, shared_memory);
#elif CUPYMLA_SHORT
  const Thread thread;
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
  const Thread thread;
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Place place(params);
  const Row row(params, place.batch, place.row, indexer_topk::limit_of(params, place.row));
  if (CUPYMLA_STAGE == 3 && row.visible() <= 0) return;
  const uint32_t count = write_row(storage, thread, params, arrays, row, place);
  if (params.lse == nullptr || part_of_row() != 0) return;
  const int32_t* columns = params.indices + place.batch * params.indices_batch + place.row * params.indices_row;
  const float lse = selected_lse(storage, thread, row, columns, count, params.lse_base2 != 0);
  if (thread.index == 0) params.lse[place.batch * params.lse_batch + place.row * params.lse_row] = lse;
#endif
}

#if CUPYMLA_SHORT
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::topk::ShortStorage), parameter_bytes = sizeof(Parameters));
#else
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(Parameters));
#endif
