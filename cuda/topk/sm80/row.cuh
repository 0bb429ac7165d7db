// One row: which of its columns are visible, and its scores in groups of eight that begin at multiples of 16 bytes.
#pragma once

#include "order.cuh"
#include "params.cuh"

namespace cupymla::topk {

constexpr int kGroup = 8;  // columns of a group

struct Row {
  const Bits* scores;   // of column 0
  int32_t begin, end;   // visible columns; begin < end, or nothing is visible
  int32_t first_group;  // that has the first visible column
  int32_t groups;       // that have visible columns
  int32_t offset;       // the first column of group 0, from -7 to 0

  // `limit`: no column from there on is visible.
  __device__ __forceinline__ Row(const Parameters& params, int64_t batch, int64_t row, int32_t limit) {
    scores = scores_of(params, batch, row);
    begin = 0;
    end = limit;
    if (params.starts != nullptr) begin = clamped(params.starts[batch * params.starts_batch + row * params.starts_row]);
    if (params.ends != nullptr) end = min(end, clamped(params.ends[batch * params.ends_batch + row * params.ends_row]));
    begin = min(begin, end);
    find_groups();
  }

  // The first `end` columns are visible.
  __device__ __forceinline__ Row(const Bits* scores, int32_t end) : scores(scores), begin(0), end(end) {
    find_groups();
  }

  static __device__ __forceinline__ const Bits* scores_of(const Parameters& params, int64_t batch, int64_t row) {
    return reinterpret_cast<const Bits*>(params.scores) + batch * params.scores_batch + row * params.scores_row;
  }

  __device__ __forceinline__ void find_groups() {
    offset = -static_cast<int32_t>(reinterpret_cast<uint64_t>(scores) % 16 / sizeof(Bits));
    first_group = group_of(begin);
    groups = begin < end ? group_of(end - 1) + 1 - first_group : 0;
  }

  static __device__ __forceinline__ int32_t clamped(int32_t column) { return max(column, 0); }

  __device__ __forceinline__ int32_t visible() const { return end - begin; }
  __device__ __forceinline__ int32_t group_of(int32_t column) const {
    return static_cast<int32_t>((static_cast<uint32_t>(column) - static_cast<uint32_t>(offset)) / kGroup);
  }
  // The first column of a group counted from the first visible one.
  __device__ __forceinline__ int32_t column(int32_t group) const {
    return static_cast<int32_t>(static_cast<uint32_t>(first_group + group) * kGroup + static_cast<uint32_t>(offset));
  }

  __device__ __forceinline__ float score(int32_t column) const { return to_float(scores[column]); }
};

// Scores of a group as they lie in memory; columns that are not visible hold -inf.
struct Group {
  static constexpr int kWords = kGroup * sizeof(Bits) / 4;
  uint32_t words[kWords];

  // Of a group all of whose columns are visible.
  __device__ __forceinline__ void load_whole(const Row& row, int32_t group) {
    const uint4* source = reinterpret_cast<const uint4*>(row.scores + row.column(group));
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 loaded = __ldcs(source + i);
      words[4 * i] = loaded.x;
      words[4 * i + 1] = loaded.y;
      words[4 * i + 2] = loaded.z;
      words[4 * i + 3] = loaded.w;
    }
  }

  // Of any group, also of one past the row's.
  __device__ __forceinline__ void load(const Row& row, int32_t group) {
    clear();
    if (group >= row.groups) return;
    if (group > 0 && group < row.groups - 1) {
      load_whole(row, group);
      return;
    }
    const int32_t column = row.column(group);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (column + i >= row.begin && column + i < row.end) set(i, row.scores[column + i]);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = sizeof(Bits) == 4 ? lowest_bits() : lowest_bits() * 0x10001u;
  }

  __device__ __forceinline__ float score(int i) const {
    if constexpr (sizeof(Bits) == 4) {
      return to_float(words[i]);
    } else {
      return to_float(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
    }
  }

 private:
  __device__ __forceinline__ void set(int i, uint32_t bits) {
    if constexpr (sizeof(Bits) == 4) {
      words[i] = bits;
    } else {
      words[i / 2] = i % 2 ? (words[i / 2] & 0xffffu) | bits << 16 : (words[i / 2] & 0xffff0000u) | bits;
    }
  }
};

// Where a row's results go.
struct Target {
  int32_t* indices;
  Bits* values;  // or null

  __device__ __forceinline__ Target(const Parameters& params, int64_t batch, int64_t row) {
    indices = params.indices + batch * params.indices_batch + row * params.indices_row;
    values = params.values == nullptr ? nullptr
                                      : reinterpret_cast<Bits*>(params.values) + batch * params.values_batch +
                                            row * params.values_row;
  }

  __device__ __forceinline__ void write(const Row& row, uint32_t entry, int32_t column) const {
    indices[entry] = column;
    if (values != nullptr) values[entry] = row.scores[column];
  }
};

}  // namespace cupymla::topk
