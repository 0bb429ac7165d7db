// Which slot of a cache a row of a request is in, by block tables and cumulated lengths of any values.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::mla_cache {

// Where a request's rows begin, clamped to what there is.
template <typename Parameters>
__device__ __forceinline__ int32_t begin_of(const Parameters& params, int32_t request) {
  const int32_t given = __ldg(params.cu_lens + request * params.lens_request);
  return static_cast<int32_t>(min(max(static_cast<int64_t>(given), int64_t{0}), params.rows));
}

// The slot of a row by its request's block table; -1 for none. Reads nothing out of the tables, whatever they hold.
template <typename Parameters>
__device__ __forceinline__ int64_t slot_of(const Parameters& params, int32_t row) {
  // Requests below `low` begin at or before the row, those from `high` on after it.
  int32_t low = 0, high = params.requests;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (begin_of(params, middle) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || row >= begin_of(params, low)) return -1;
  const int32_t position = row - begin_of(params, low - 1);
  const int32_t column = position / params.page;
  if (column >= params.width) return -1;
  const int32_t block =
      __ldg(params.block_tables + (low - 1) * params.tables_request + column * params.tables_block);
  if (block < 0 || block >= params.blocks) return -1;
  return static_cast<int64_t>(block) * params.page + (position - column * params.page);
}

}  // namespace cupymla::mla_cache
