// Where sums of a block's dKV rows go, and how a warp arranges and sends them.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// Where sums of a block's dKV rows go: added to the token's row, or stored in the entry's own.
//
// Sums that are added leave by whole lines of 128 bytes, to which eight lanes have a part: half of all rows cross to
// the other half of L2, whose link takes requests by number. Rows that are stored leave by halves of lines, which takes
// fewer shuffles and measured faster.
template <typename Config>
struct RowTargets {
  const Parameters& params;
  const int32_t (&entries)[2];  // this thread's: tokens of `row` and of eight rows further down; -1: nothing to write
  float* start;               // of row 0
  int row;
  bool add;  // in partials: whether an earlier head block has written them

  __device__ __forceinline__ RowTargets(const Parameters& params, const QueryPosition& query, int32_t first_entry,
                                        int32_t head_block, int row, const int32_t (&entries)[2])
      : params(params), entries(entries), row(row), add(head_block > 0) {
    const int64_t place = static_cast<int64_t>(query.batch) * params.s_q + query.query - params.query_begin;
    start = Config::kPartials ? params.partials + (place * params.topk + first_entry) * Config::kDQk
                              : params.sums + query.batch * params.sums_batch;
  }

  static constexpr int kLine = 32;  // columns that are sent at a time

  static __device__ __forceinline__ constexpr bool whole_lines() { return !Config::kPartials; }

  // Rows that a lane's two parts of a line go to, four columns each, of `row` and of eight rows further down. Of a
  // whole line the even quad of two has the first half and the odd quad the second, first of the even quad's entry,
  // then of the odd quad's. Found again for each tile: there are no registers to keep them in.
  struct Places {
    int32_t first[2], second[2];
  };

  __device__ __forceinline__ Places places(int lane) const {
    // The same bit, from where ptxas need not keep it (it spills otherwise).
    const bool odd = Config::kQueries > 1 ? (lane & 4) != 0 : (row & 1) != 0;
    Places found;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t own = Config::kPartials && entries[r] >= 0 ? row + 8 * r : entries[r];
      found.first[r] = found.second[r] = own;
      if (whole_lines()) {
        const int32_t other = __shfl_xor_sync(0xffffffffu, own, 4);
        found.first[r] = odd ? other : own;
        found.second[r] = odd ? own : other;
      }
    }
    return found;
  }

  // Where in the line the first part begins.
  static __device__ __forceinline__ int32_t column_of(int lane) {
    return (whole_lines() ? (lane & 4) * 4 : 0) + (lane & 1) * 8 + lane % 4 / 2 * 4;
  }

  static __device__ __forceinline__ constexpr int32_t columns_between() { return whole_lines() ? 0 : kLine / 2; }

  // Takes a line's columns of an accumulator with 64 entries as rows, whose first column is `column` of the row.
  template <int kCount>
  __device__ __forceinline__ void send_line(const float (&sums)[kCount], const Places& places, int line, int32_t column,
                                            int lane) const {
    int32_t here = column + line * kLine + column_of(lane);
    make_opaque(here);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float first[4], second[4];
      arrange(sums + line * 16 + 2 * r, first, second, lane);
      if (places.first[r] >= 0) write(places.first[r], here, first);
      if (places.second[r] >= 0) write(places.second[r], here + columns_between(), second);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void send(const float (&sums)[kCount], int32_t column, int lane) const {
    if constexpr (Config::kPartials) make_opaque(lane);  // or what follows from it is kept, and spilled
    const Places found = places(lane);
#pragma unroll
    for (int line = 0; line < kCount / 16; ++line) send_line(sums, found, line, column, lane);
  }

  // Eight sums of an entry, of two columns in each of four tiles of eight, to four columns in a row of the line's first
  // half and four of its second; for whole lines to the same four of the even quad's entry and of the odd quad's.
  static __device__ __forceinline__ void arrange(const float* s, float (&first)[4], float (&second)[4], int lane) {
    neighbours(s, first, lane);
    neighbours(s + 8, second, lane);
    if (!whole_lines()) return;
    const bool odd = (lane & 4) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float got = __shfl_xor_sync(0xffffffffu, odd ? first[i] : second[i], 4);
      first[i] = odd ? got : first[i];
      second[i] = odd ? second[i] : got;
    }
  }

  // Neighbouring lanes exchange halves of sixteen columns of an entry, so that each has four columns in a row.
  static __device__ __forceinline__ void neighbours(const float* s, float (&out)[4], int lane) {
    const bool odd = (lane & 1) != 0;
    const float x = __shfl_xor_sync(0xffffffffu, odd ? s[0] : s[4], 1);
    const float y = __shfl_xor_sync(0xffffffffu, odd ? s[1] : s[5], 1);
    out[0] = odd ? x : s[0];
    out[1] = odd ? y : s[1];
    out[2] = odd ? s[4] : x;
    out[3] = odd ? s[5] : y;
  }

  __device__ __forceinline__ void write(int32_t row, int32_t column, const float (&four)[4]) const {
    const int64_t stride = Config::kPartials ? Config::kDQk : params.sums_token;
    put(start + row * stride + column, four);
  }

  __device__ __forceinline__ void put(float* address, const float (&four)[4]) const {
    if (Config::kPartials && !add) {
      store_float4(address, four);
    } else {
      // In partials the same thread has written the row before, so nothing is left to chance.
      reduce_add_float4(address, four);
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
