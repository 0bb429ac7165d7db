// The largest scores of each row, exact and in a total order: a CTA takes a row, or a cluster where rows are few.
// README.md says how.
#include "../../common/entry.cuh"
#include "select_row.cuh"

// CUPYMLA_SCORES: type of the scores, 0 fp32, 1 bf16, 2 fp16.

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    topk(const __grid_constant__ cupymla::topk::Parameters params) {
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Thread thread;
  const Place place(params);
  const Row row(params, place.batch, place.row, params.columns);
  write_row(storage, thread, params, arrays, row, place);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(cupymla::topk::Parameters));
