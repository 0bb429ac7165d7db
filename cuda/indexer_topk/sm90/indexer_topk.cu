// The selection of index scores that cuda/indexer_logits has left in the workspace: topk's, with the causal limit and
// the log-sum-exp of what is selected. README.md has the chunks of rows in which both kernels run.
#define CUPYMLA_SCORES 0
#include "../../common/entry.cuh"
#include "../../common/indexer_score.cuh"
#include "../../topk/sm80/lse.cuh"
#include "../../topk/sm80/select_row.cuh"
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::topk::kMaxThreads)
    indexer_topk(const __grid_constant__ cupymla::indexer_topk::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::topk;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Thread thread;
  const Place place(params);
  const int32_t limit = params.causal == 0
                            ? params.columns
                            : indexer::causal_end(params.q_start, place.row, params.k_stride, params.columns);
  const Row row(params, place.batch, place.row, limit);
  const uint32_t count = write_row(storage, thread, params, arrays, row, place);
  if (params.lse == nullptr || part_of_row() != 0) return;
  const int32_t* columns = params.indices + place.batch * params.indices_batch + place.row * params.indices_row;
  const float lse = selected_lse(storage, thread, row, columns, count, params.lse_base2 != 0);
  if (thread.index == 0) params.lse[place.batch * params.lse_batch + place.row * params.lse_row] = lse;
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::topk::kMaxThreads, cluster = 1, smem_bytes = sizeof(cupymla::topk::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_topk::Parameters));
