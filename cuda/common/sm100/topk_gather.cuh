// The entries of a query for TMA gathers: which of them are valid, and which rows of the KV map they name. The map has
// rows of d_qk columns in boxes of one row x 64 columns with the 128-byte swizzle; its row numbers count batch entries
// and tokens together (mirrored: cupymla/ops/kv_rows.py). An invalid entry names row -1, which reads as zeros.
#pragma once

#include "../sparse_query.cuh"
#include "../swizzle.cuh"
#include "gather.cuh"

namespace cupymla::sm100 {

constexpr int kGroupKeys = 64;      // entries of a group: the rows of one tile
constexpr int kTileColumns = 64;    // 16-bit elements in a 128-byte row
constexpr uint32_t kTileBytes = kGroupKeys * kSwizzleRowBytes;
constexpr int kGatherRows = 4;      // of one instruction

// Valid entries of one query. Parameters: indices, indices_batch, indices_query (in elements), token_rows, batch_rows
// (rows of the map from one token, and one batch entry, to the next).
struct QueryEntries {
  const int32_t* indices;
  int32_t entries;       // those that can be valid
  uint32_t token_limit;  // token t can be valid when (uint32_t)t < token_limit
  int32_t first_row, token_rows;

  template <typename Parameters, int kBlockKeys>
  __device__ __forceinline__ QueryEntries(const Parameters& params, const SparseQuery<kBlockKeys>& query)
      : indices(params.indices + query.batch * params.indices_batch + query.query * params.indices_query),
        entries(query.entries),
        token_limit(query.token_limit),
        first_row(query.batch * params.batch_rows),
        token_rows(params.token_rows) {}

  // The token of an entry, or -1 where there is no entry.
  __device__ __forceinline__ int32_t token(int32_t entry) const {
    return entry < entries ? __ldg(indices + entry) : -1;
  }

  __device__ __forceinline__ bool is_valid(int32_t token) const { return static_cast<uint32_t>(token) < token_limit; }

  __device__ __forceinline__ int32_t row(int32_t token) const {
    return is_valid(token) ? first_row + token * token_rows : -1;
  }

  // Tokens of four entries from `entry` on; `rows` turns them into rows once they are needed.
  __device__ __forceinline__ int4 four_tokens(int32_t entry) const {
    return make_int4(token(entry), token(entry + 1), token(entry + 2), token(entry + 3));
  }

  __device__ __forceinline__ int4 rows(int4 tokens) const {
    return make_int4(row(tokens.x), row(tokens.y), row(tokens.z), row(tokens.w));
  }
};

// This lane's first entry among those of a group, for `gather_group` of as many rows: 64 or 128.
template <int kRows = kGroupKeys>
__device__ __forceinline__ int32_t group_entry(uint32_t lane) {
  return static_cast<int32_t>(lane % (kRows / kGatherRows)) * kGatherRows;
}

// Copies `kTiles` neighbouring column tiles, from tile `first_tile` of the rows on, of a group's 64 or 128 rows into as
// many tiles of as many rows of 128 bytes behind each other: a whole warp, whose lane l knows the rows of entries
// group_entry(l) and on. All of the tiles' bytes count as copied. With kPair they count at the even CTA's barrier.
template <int kTiles, bool kPair, int kRows = kGroupKeys>
__device__ __forceinline__ void gather_group(uint8_t* tiles, const TensorMap& map, Mbarrier& full, int32_t first_tile,
                                             int4 rows, uint32_t lane) {
  constexpr int kLanes = kRows / kGatherRows, kAtOnce = 32 / kLanes;
  static_assert(kLanes == 16 || kLanes == 32);
  uint8_t* own = tiles + lane % kLanes * kGatherRows * kSwizzleRowBytes;
#pragma unroll
  for (int first = 0; first < kTiles; first += kAtOnce) {
    const int tile = first + static_cast<int>(lane / kLanes);
    if (first + kAtOnce > kTiles && tile >= kTiles) break;
    uint8_t* destination = own + tile * (kRows * kSwizzleRowBytes);
    const int32_t column = (first_tile + tile) * kTileColumns;
    if constexpr (kPair) {
      gather_rows_of_pair(destination, map, full, column, rows);
    } else {
      gather_rows(destination, map, full, column, rows);
    }
  }
}

// Which of a group's 64 entries are valid, bit i for entry `first` + i: a whole warp, whose lane l has the tokens of
// entries l and l + 32.
__device__ __forceinline__ uint64_t valid_entries(const QueryEntries& query, int32_t low_token, int32_t high_token) {
  const uint32_t low = __ballot_sync(0xffffffffu, query.is_valid(low_token));
  const uint32_t high = __ballot_sync(0xffffffffu, query.is_valid(high_token));
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace cupymla::sm100
