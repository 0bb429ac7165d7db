// The largest scores of each row, exact and in a total order: a CTA takes a row, or a cluster where rows are few.
// README.md says how.
//
// CUPYMLA_SCORES: type of the scores, 0 fp32, 1 bf16, 2 fp16. CUPYMLA_SHORT: columns of a thread that keeps them, where
// ids ascend; 0 for all other rows. CUPYMLA_CLUSTER: whether the CTAs of a cluster keep a row together.
#include "../../common/entry.cuh"
#if CUPYMLA_SHORT
#include "short_row.cuh"
#else
#include "select_row.cuh"
#endif

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    topk(const __grid_constant__ cupymla::topk::Parameters params) {
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  const Thread thread;
#if CUPYMLA_SHORT
  uint32_t* bins = short_bins(shared_memory);
  clear_own_bins(thread, bins);
  Exchange exchange(*reinterpret_cast<ShortStorage*>(shared_memory), thread);
  const uint32_t place = exchange.row();
  const uint32_t batch = place / static_cast<uint32_t>(params.rows);
  const uint32_t number = place % static_cast<uint32_t>(params.rows);
  const Row row(params, batch, number, params.columns);
  const Columns columns(thread, row, exchange.rank, exchange.parts);
  OwnScores scores(thread, bins);
  LoadedScores(row, columns).keep(scores);
  exchange.begin();
  write_short(exchange, bins, params, row, columns, scores, batch, number, ColumnIds{columns});
#else
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Place place(params);
  const Row row(params, place.batch, place.row, params.columns);
  write_row(storage, thread, params, arrays, row, place);
#endif
}

#if CUPYMLA_SHORT
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::topk::ShortStorage),
                     parameter_bytes = sizeof(cupymla::topk::Parameters));
#else
CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(cupymla::topk::Parameters));
#endif
