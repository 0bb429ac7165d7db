// The selection from a short row of scores, by cuda/topk/sm80/short_row.cuh.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../topk/sm80/short_lse.cuh"
#include "lengths.cuh"

namespace cupymla::paged_indexer {

// The ids of a thread's columns. Those side by side are in one block, where blocks are of so many keys.
struct Ids {
  const Paged& paged;
  const topk::Columns& columns;
  const int32_t* table;  // null: ids are positions
  const uint32_t page;
  const int page_log2;   // -1: the page is no power of two, which is rare
  const bool together;
  const int32_t seen;  // how many columns are
  uint32_t block;      // of the first column

  // Loads what can be before it is known what is selected. Entries of further chunks are mostly in the same line.
  __device__ __forceinline__ Ids(const SelectionParameters& params, const topk::Columns& columns, int64_t request,
                                 int32_t seen)
      : paged(params.paged),
        columns(columns),
        table(params.slots == 0 ? nullptr : paged.block_tables + request * paged.tables_request),
        page(static_cast<uint32_t>(paged.page)),
        page_log2((page & page - 1) == 0 ? __ffs(paged.page) - 1 : -1),
        together(table == nullptr || page % topk::kSide == 0),
        seen(seen) {
    block = entry_of(0);
  }

  // The id of the first column in a chunk, or its position where others do not follow from it.
  __device__ __forceinline__ int32_t first(int chunk) const {
    const uint32_t position = static_cast<uint32_t>(columns.of(chunk));
    if (table == nullptr || !together) return static_cast<int32_t>(position);
    const uint32_t of_chunk = chunk == 0 ? block : entry_of(chunk);
    return static_cast<int32_t>(of_chunk * page + position - block_of(position) * page);
  }

  __device__ __forceinline__ int32_t operator()(int32_t first, uint32_t i) const {
    const uint32_t position = static_cast<uint32_t>(first) + i;
    if (together) return static_cast<int32_t>(position);
    const uint32_t entry = block_of(position);
    const uint32_t block = static_cast<uint32_t>(table[entry * paged.tables_block]);
    return static_cast<int32_t>(block * page + position - entry * page);
  }

 private:
  __device__ __forceinline__ uint32_t entry_of(int chunk) const {
    const int32_t position = columns.of(chunk);
    if (table == nullptr || !together || position >= seen) return 0;
    return static_cast<uint32_t>(table[block_of(static_cast<uint32_t>(position)) * paged.tables_block]);
  }

  // The number of a position's block in the table.
  __device__ __forceinline__ uint32_t block_of(uint32_t position) const {
    return page_log2 >= 0 ? position >> page_log2 : position / page;
  }
};

__device__ __forceinline__ void select_short_row(uint8_t* shared_memory, const SelectionParameters& params) {
  using namespace topk;
  const Thread thread;
  uint32_t* bins = short_bins(shared_memory);
  clear_own_bins(thread, bins);
  Exchange exchange(*reinterpret_cast<ShortStorage*>(shared_memory), thread);
  const uint32_t place = exchange.row();
  const uint32_t rows = static_cast<uint32_t>(params.rows);
  const uint32_t request = rows == 1 ? place : place / rows;
  const uint32_t query = place - request * rows;
  // What no kernel of the call writes may be read before those that score have ended; the first one of them has waited
  // for all that came before the call.
  const Row row(Row::scores_of(params, request, query), seen_keys(params.paged, request, static_cast<int32_t>(query)));
  const Columns columns(thread, row, exchange.rank, exchange.parts);
  const Ids ids(params, columns, request, row.end);
  OwnScores scores(thread, bins);
  exchange.begin();
  // Scores are there, and results may be written, from here on.
  griddepcontrol_wait();
  LoadedScores(row, columns).keep(scores);
  const ShortSelection selection = write_short(exchange, bins, params, row, columns, scores, request, query, ids);
  if (params.lse == nullptr) return;
  const float lse = short_lse(exchange, columns, scores, selection, params.lse_base2 != 0);
  if (exchange.rank == 0 && thread.index == 0) params.lse[request * params.lse_batch + query * params.lse_row] = lse;
}

}  // namespace cupymla::paged_indexer
