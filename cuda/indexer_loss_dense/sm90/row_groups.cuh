// Groups of rows that see some of the keys of a block, found by a whole warp, 32 groups at a time.
#pragma once

#include "config.cuh"
#include "row_bounds.cuh"

namespace cupymla::indexer_loss_dense {

struct RowGroups {
  const Parameters& params;
  const Bounds keys;  // of the block
  int32_t next_rows;  // from here on nobody has looked
  const int32_t end_row;
  int32_t rows = 0;    // first one of those that `seeing` is of
  uint32_t seeing = 0;  // groups not yet given

  __device__ __forceinline__ RowGroups(const Parameters& params, const Bounds& keys, int32_t first_row, int32_t end_row)
      : params(params), keys(keys), next_rows(first_row), end_row(min(end_row, params.queries)) {}

  // The first row of the next group; false where there is none. The same in all lanes.
  __device__ __forceinline__ bool next(int32_t& first_row) {
    while (seeing == 0) {
      if (next_rows >= end_row) return false;
      rows = next_rows;
      next_rows += 32 * kRows;
      const int32_t own = rows + static_cast<int32_t>(threadIdx.x % 32) * kRows;
      const Bounds any = own < end_row ? visible_to_any<kRows>(params, own) : Bounds{0, 0};
      seeing = __ballot_sync(0xffffffffu, !any.is_empty() && any.begin < keys.end && keys.begin < any.end);
    }
    first_row = rows + (__ffs(static_cast<int>(seeing)) - 1) * kRows;
    seeing &= seeing - 1;
    return true;
  }
};

}  // namespace cupymla::indexer_loss_dense
