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

  // Loads what can be loaded before it is known what is selected, where `real`. `seen`: how many columns are.
  __device__ __forceinline__ Ids(const SelectionParameters& params, const topk::Thread& thread, int64_t request,
                                 int32_t seen, bool real)
      : paged(params.paged),
        thread(thread),
        table(params.slots == 0 ? nullptr : paged.block_tables + request * paged.tables_request),
        together(table == nullptr || static_cast<uint32_t>(paged.page) % topk::kSide == 0) {
#pragma unroll
    for (int chunk = 0; chunk < topk::kChunks; ++chunk) {
      const int32_t first = topk::first_column(thread, chunk);
      base[chunk] = first;
      if (table != nullptr && together && real && first < seen) base[chunk] = slot(static_cast<uint32_t>(first));
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
  // While the scores are made there is time to fetch the code: it runs once on what is no row's, and writes nothing.
#pragma unroll 1
  for (bool real = params.rehearses == 0;; real = true) {
    // Scores, lengths and tables may be read, and results written, from here on.
    if (real) griddepcontrol_wait();
    const Row row(params, request, query, real ? seen_keys(params.paged, request, query) : params.columns);
    const Ids ids(params, thread, request, row.end, real);
    OwnScores scores(thread, bins);
    if (real) {
      load_own(thread, row, scores);
    } else {
#pragma unroll(kUnroll)
      for (int i = 0; i < kOwn; ++i) scores.set(i, static_cast<float>(thread.index * kOwn + i));
    }
    const ShortSelection selection = select_short(storage, bins, thread, scores, row.visible(), params.topk);
    if (params.lse != nullptr) {
      const float lse = short_lse(storage, thread, scores, selection, params.lse_base2 != 0);
      if (real && thread.index == 0) params.lse[request * params.lse_batch + query * params.lse_row] = lse;
    }
    if (real) {
      write_short(thread, params, Target(params, request, query), scores, selection, ids,
                  params.count + request * params.count_batch + query * params.count_row);
      return;
    }
    // Memory is used again.
    __syncthreads();
  }
}

}  // namespace cupymla::paged_indexer
