// Where rows of a block's dKV go that are stored on their own, packed.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../packed_columns.cuh"
#include "../params.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

// Of 32 columns a thread of a quad has two neighbours of every eight, and packs these together: nothing is exchanged.
//
//   vector of 32 columns   0              1              2               3
//   columns                0 1 8 9 16 17  2 3 10 11 18   4 5 12 13 20    6 7 14 15 22
//                          24 25          19 26 27       21 28 29        23 30 31
//
// Of packed queries each row is all queries' sum. Where they are taken one by one, as something is not finite, a row is
// written for the first and added to for the others, by the same thread; until a query has it, it is zero.
template <typename Config>
struct PackedEntryTargets {
  static constexpr int kGroup = 32;  // columns of which a quad has all
  static constexpr int kGroups = Config::kTileColumns / kGroup;
  static constexpr int kRowBytes = Config::kDQk * 2;

  const Storage<Config>& storage;
  const Parameters& params;
  const int32_t (&entries)[2];  // this thread's: tokens of `row` and of eight rows further down; -1: nothing to write
  int32_t first_entry, head_block;
  int row;

  __device__ __forceinline__ PackedEntryTargets(const Storage<Config>& storage, const Parameters& params,
                                                int32_t first_entry, int32_t head_block, int row,
                                                const int32_t (&entries)[2])
      : storage(storage), params(params), entries(entries), first_entry(first_entry), head_block(head_block), row(row) {}

  // Takes 64 columns of an accumulator with 64 entries as rows, whose first column is `column` of the row.
  template <int kCount>
  __device__ __forceinline__ void send(const float (&sums)[kCount], int32_t column, int lane) const {
    static_assert(kCount == 2 * kGroups * kPackedColumns);
    uint32_t place = blockIdx.x;
    make_opaque(place);  // or what follows from it is kept, and spilled
    if constexpr (Config::kQueries > 1) make_opaque(lane);
    const int32_t first = static_cast<int32_t>(place) * Config::kQueries * params.topk + first_entry + row;
    uint8_t* const to = reinterpret_cast<uint8_t*>(params.partials) + static_cast<int64_t>(first) * kRowBytes +
                        (column + lane % 4 * kPackedColumns) * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) send_row(sums, r, to + r * 8 * kRowBytes);
  }

  template <int kCount>
  __device__ __forceinline__ void send_row(const float (&sums)[kCount], int r, uint8_t* to) const {
    float eights[kGroups][kPackedColumns];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kPackedColumns; ++i) eights[group][i] = sums[(group * 4 + i / 2) * 4 + r * 2 + i % 2];
    }
    bool is_written = entries[r] >= 0;
    if constexpr (Config::kQueries > 1) {
      if (*static_cast<const volatile uint32_t*>(&storage.non_finite) != 0) is_written = put_one_by_one(eights, is_written, r, to);
    }
    uint4 packed[kGroups];
    pack_eights(eights, packed);
    if (!is_written) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) store_uint4(to + group * kGroup * 2, packed[group]);
  }

  // What is stored of a row where queries are taken one by one, and whether it is.
  __device__ __forceinline__ bool put_one_by_one(float (&eights)[kGroups][kPackedColumns], bool is_own, int r,
                                                 const uint8_t* to) const {
    if (head_block > 0) {
      if (!is_own) return false;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        add_packed_columns(eights[group], *reinterpret_cast<const uint4*>(to + group * kGroup * 2));
      }
      return true;
    }
    if (!is_own) {
#pragma unroll
      for (auto& eight : eights) {
#pragma unroll
        for (float& column : eight) column = 0.f;
      }
    }
    return first_entry + row + 8 * r < storage.entries;
  }
};

}  // namespace cupymla::sparse_mla_bwd
