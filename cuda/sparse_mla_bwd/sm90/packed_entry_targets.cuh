// Where rows of a block's dKV go that are stored on their own, packed.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/store_entry.cuh"
#include "../packed_columns.cuh"
#include "../group_words.cuh"
#include "../params.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

// Of 32 columns a thread of a quad has two neighbours of every eight, and packs these together: nothing is exchanged.
//
//   vector of 32 columns   0              1              2               3
//   columns                0 1 8 9 16 17  2 3 10 11 18   4 5 12 13 20    6 7 14 15 22
//                          24 25          19 26 27       21 28 29        23 30 31
//
// Of packed queries each row is all queries' sum, and what stands behind the last is stored as well: there is room.
// Where they are taken one by one, as something is not finite, a row is written for the first and added to for the
// others, by the same thread; until a query has it, it is zero.
template <typename Config>
struct PackedEntryTargets {
  static constexpr int kLine = 32;  // columns of which a quad has all
  static constexpr int kRowBytes = Config::kDQk * 2;

  const Storage<Config>& storage;
  const Parameters& params;
  const int32_t (&entries)[2];  // this thread's: tokens of `row` and of eight rows further down; -1: nothing to write
  int32_t first_entry, head_block;
  int row;

  __device__ __forceinline__ PackedEntryTargets(const Storage<Config>& storage, const Parameters& params,
                                                int32_t first_entry, int32_t head_block, int row,
                                                const int32_t (&entries)[2])
      : storage(storage),
        params(params),
        entries(entries),
        first_entry(first_entry),
        head_block(head_block),
        row(row) {}

  // Found again for each line: there are no registers to keep them in.
  struct Places {};
  __device__ __forceinline__ Places places(int) const { return {}; }

  // Where a line of this thread's upper row goes.
  __device__ __forceinline__ uint8_t* start(int line, int32_t column, int lane) const {
    uint32_t place = blockIdx.x;
    make_opaque(place);  // or what follows from it is kept, and spilled
    make_opaque(lane);
    const int32_t first = static_cast<int32_t>(place) * stored_rows<Config::kQueries>(params) + first_entry + row;
    return reinterpret_cast<uint8_t*>(params.partials) + static_cast<int64_t>(first) * kRowBytes +
           (column + line * kLine + lane % 4 * kPackedColumns) * 2;
  }

  template <int kCount>
  static __device__ __forceinline__ void take(const float (&sums)[kCount], int line, int r,
                                              float (&eight)[kPackedColumns]) {
#pragma unroll
    for (int i = 0; i < kPackedColumns; ++i) eight[i] = sums[(line * 4 + i / 2) * 4 + r * 2 + i % 2];
  }

  // Takes a line's columns of an accumulator with 64 entries as rows, whose first column is `column` of the row.
  template <int kCount>
  __device__ __forceinline__ void send_line(const float (&sums)[kCount], const Places&, int line, int32_t column,
                                            int lane) const {
    float eights[2][kPackedColumns];
    uint4 packed[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      take(sums, line, r, eights[r]);
      // After the line before has left: there are no registers to pack more at a time.
#pragma unroll
      for (float& column : eights[r]) make_opaque(column);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) packed[r] = pack_by_selects(eights[r]);
    uint8_t* const to = start(line, column, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Config::kQueries > 1) {
        store_uint4(to + r * 8 * kRowBytes, packed[r]);
      } else {
        store_uint4_of_entry(entries[r], to + r * 8 * kRowBytes, packed[r]);
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void send(const float (&sums)[kCount], int32_t column, int lane) const {
    if constexpr (Config::kQueries > 1) {
      if (*static_cast<const volatile uint32_t*>(&storage.non_finite) != 0) {
        send_one_by_one(sums, column, lane);
        return;
      }
    }
#pragma unroll
    for (int line = 0; line < kCount / 16; ++line) send_line(sums, Places{}, line, column, lane);
  }

  // The same where queries are taken one by one: no product may be under way.
  template <int kCount>
  __device__ __forceinline__ void send_one_by_one(const float (&sums)[kCount], int32_t column, int lane) const {
#pragma unroll
    for (int line = 0; line < kCount / 16; ++line) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float eight[kPackedColumns];
        take(sums, line, r, eight);
        // Row by row, for there are few registers.
#pragma unroll
        for (float& value : eight) make_opaque(value);
        put_one_by_one(eight, entries[r] >= 0, start(line, column, lane) + r * 8 * kRowBytes);
      }
    }
  }

  __device__ __forceinline__ void put_one_by_one(float (&eight)[kPackedColumns], bool is_own, uint8_t* to) const {
    if (head_block > 0) {
      if (!is_own) return;
      const volatile uint32_t* old = reinterpret_cast<const volatile uint32_t*>(to);
      add_packed_columns(eight, make_uint4(old[0], old[1], old[2], old[3]));
    } else if (!is_own) {
#pragma unroll
      for (float& column : eight) column = 0.f;
    }
    store_uint4(to, pack_by_selects(eight));
  }
};

}  // namespace cupymla::sparse_mla_bwd
