// The selection from a short row of scores, by cuda/topk/sm80/short_row.cuh.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../topk/sm80/short_lse.cuh"
#include "lengths.cuh"

namespace cupymla::paged_indexer {

// The ids of a thread's columns. Those side by side are in one block, where blocks are of so many keys.
struct Ids {
  const Paged& paged;
  const topk::Thread& thread;
  const int32_t* table;  // null: ids are positions
  const bool together;
  int32_t base[topk::kChunks];

  // Loads what can be loaded before it is known what is selected. `seen`: how many columns are.
  __device__ __forceinline__ Ids(const SelectionParameters& params, const topk::Thread& thread, int64_t request,
                                 int32_t seen)
      : paged(params.paged),
        thread(thread),
        table(params.slots == 0 ? nullptr : paged.block_tables + request * paged.tables_request),
        together(table == nullptr || static_cast<uint32_t>(paged.page) % topk::kSide == 0) {
#pragma unroll
    for (int chunk = 0; chunk < topk::kChunks; ++chunk) {
      const int32_t first = topk::first_column(thread, chunk);
      base[chunk] = first;
      if (table != nullptr && together && first < seen) base[chunk] = slot(static_cast<uint32_t>(first));
    }
  }

  __device__ __forceinline__ int32_t operator()(int chunk, int i) const {
    return together ? base[chunk] + i : slot(static_cast<uint32_t>(base[chunk] + i));
  }

 private:
  __device__ __forceinline__ int32_t slot(uint32_t position) const {
    const uint32_t page = static_cast<uint32_t>(paged.page);
    const uint32_t block = static_cast<uint32_t>(table[position / page * paged.tables_block]);
    return static_cast<int32_t>(block * page + position % page);
  }
};

__device__ __forceinline__ void select_short_row(uint8_t* shared_memory, const SelectionParameters& params) {
  using namespace topk;
  ShortStorage& storage = *reinterpret_cast<ShortStorage*>(shared_memory);
  uint32_t* bins = short_bins(shared_memory);
  const Thread thread;
  const int64_t request = blockIdx.x / static_cast<uint32_t>(params.rows);
  const int32_t query = static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(params.rows));
  // Lengths are the only limits.
  __builtin_assume(params.starts == nullptr);
  __builtin_assume(params.ends == nullptr);
  clear_own_bins(thread, bins);
  // Scores, lengths and tables may be read, and results written, from here on.
  griddepcontrol_wait();
  const Row row(params, request, query, seen_keys(params.paged, request, query));
  const Ids ids(params, thread, request, row.end);
  OwnScores scores(thread, bins);
  load_own(thread, row, scores);
  const ShortSelection selection = select_short(storage, bins, thread, scores, row.visible(), params.topk);
  if (params.lse != nullptr) {
    const float lse = short_lse(storage, thread, scores, selection, params.lse_base2 != 0);
    if (thread.index == 0) params.lse[request * params.lse_batch + query * params.lse_row] = lse;
  }
  write_short(thread, params, Target(params, request, query), scores, selection, ids,
              params.count + request * params.count_batch + query * params.count_row);
}

}  // namespace cupymla::paged_indexer
