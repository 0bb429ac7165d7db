// The largest scores of each row, exact and in a total order: a CTA takes a row, or a cluster where rows are few.
// README.md says how.
//
// CUPYMLA_SCORES: type of the scores, 0 fp32, 1 bf16, 2 fp16. CUPYMLA_SHORT: columns of a thread that keeps them in
// registers, where ids ascend; 0 for all other rows.
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
  ShortStorage& storage = *reinterpret_cast<ShortStorage*>(shared_memory);
  uint32_t* bins = short_bins(shared_memory);
  clear_own_bins(thread, bins);
  const int64_t batch = blockIdx.x / static_cast<uint32_t>(params.rows);
  const int64_t number = blockIdx.x % static_cast<uint32_t>(params.rows);
  const Row row(params, batch, number, params.columns);
  OwnScores scores(thread, bins);
  load_own(thread, row, scores);
  const ShortSelection selection = select_short(storage, bins, thread, scores, row.visible(), params.topk);
  const auto id = [&thread](int chunk, int i) { return first_column(thread, chunk) + i; };
  write_short(thread, params, Target(params, batch, number), scores, selection, id,
              params.count + batch * params.count_batch + number * params.count_row);
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
