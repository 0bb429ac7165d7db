// The selection from a short row of scores, by cuda/topk/sm80/short_row.cuh.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../topk/sm80/short_lse.cuh"
#include "lengths.cuh"

namespace cupymla::paged_indexer {

// The ids of a thread's columns, which are side by side: in one block where blocks are of so many keys.
struct Ids {
  const Paged& paged;
  const int32_t* table;  // null: ids are positions
  const int32_t first;   // column
  const bool together;
  int32_t base = 0;

  // `there`: whether there are columns. Loads what can be loaded before it is known which are selected.
  __device__ __forceinline__ Ids(const SelectionParameters& params, int64_t request, int32_t first, bool there)
      : paged(params.paged),
        table(params.slots == 0 ? nullptr : paged.block_tables + request * paged.tables_request),
        first(first),
        together(table == nullptr || static_cast<uint32_t>(paged.page) % topk::kOwn == 0) {
    if (together && there) base = table == nullptr ? first : slot(static_cast<uint32_t>(first));
  }

  __device__ __forceinline__ int32_t operator()(int i) const {
    return together ? base + i : slot(static_cast<uint32_t>(first + i));
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
  const int32_t first = static_cast<int32_t>(thread.index) * kOwn;
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
    const Ids ids(params, request, first, real && first < row.end);
    float scores[kOwn];
    if (real) {
      load_own(thread, row, scores);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) scores[i] = first + i < row.end ? static_cast<float>(first + i) : 0.0f;
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
