// Groups of rows that see some of the keys of a block, found by a whole warp, 32 groups at a time.
#pragma once

#include "config.cuh"
#include "row_bounds.cuh"

namespace cupymla::indexer_loss_dense {

// A group of rows, with a bit for each row that takes no part in products, and for each that is spoilt.
struct RowGroup {
  int32_t first_row;
  uint32_t left_out, spoilt;
};

struct RowGroups {
  const Parameters& params;
  const Bounds keys;  // of the block
  int32_t next_rows;  // from here on nobody has looked
  const int32_t end_row;
  int32_t rows = 0;    // first one of those that `seeing` is of
  uint32_t seeing = 0;  // groups not yet given
  uint32_t own_states = 0;  // this lane's group: spoilt rows behind those that are left out

  __device__ __forceinline__ RowGroups(const Parameters& params, const Bounds& keys, int32_t first_row, int32_t end_row)
      : params(params), keys(keys), next_rows(first_row), end_row(min(end_row, params.queries)) {}

  // The next group; false where there is none. The same in all lanes. kStates: whether states are known by now.
  template <bool kStates>
  __device__ __forceinline__ bool next(RowGroup& group) {
    while (seeing == 0) {
      if (next_rows >= end_row) return false;
      rows = next_rows;
      next_rows += 32 * kRows;
      const int32_t own = rows + static_cast<int32_t>(threadIdx.x % 32) * kRows;
      const Bounds any = own < end_row ? visible_to_any<kRows>(params, own) : Bounds{0, 0};
      if constexpr (kStates) {
        own_states = 0;
        for (int row = 0; row < kRows && own < end_row; ++row) {
          const int32_t state = params.states[own + row];
          own_states |= (state != kSound ? 1u << row : 0u) | (state == kSpoilt ? 16u << row : 0u);
        }
      }
      seeing = __ballot_sync(0xffffffffu, !any.is_empty() && any.begin < keys.end && keys.begin < any.end);
    }
    const int first = __ffs(static_cast<int>(seeing)) - 1;
    const uint32_t states = kStates ? __shfl_sync(0xffffffffu, own_states, first) : 0;
    group = {rows + first * kRows, states & 15u, states >> 4};
    seeing &= seeing - 1;
    return true;
  }
};

}  // namespace cupymla::indexer_loss_dense
