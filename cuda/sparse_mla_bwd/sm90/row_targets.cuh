// Where sums of a block's dKV rows go, and how a warp arranges and sends them.
#pragma once

#include "../../common/math.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"
#include "runs.cuh"

namespace cupymla::sparse_mla_bwd {

// Where sums of a block's dKV rows go: added to the token's row, or stored in the entry's own.
//
// Sums that are added leave by whole lines of 128 bytes, to which eight lanes have a part: half of all rows cross to
// the other half of L2, whose link takes requests by number. There are spare rows for entries that are not valid: a
// branch around each reduction would keep products and reductions of different tiles apart. Rows that are stored leave
// by halves of lines, which takes no shuffles and measured faster.
template <typename Config>
struct RowTargets {
  const Parameters& params;
  int32_t rows[2];  // of this thread's two entries; where they are stored negative for those that are not
  bool add;         // in partials: whether an earlier head block has written them

  // `entries`: tokens of `row` and of eight rows further down, or -1.
  __device__ __forceinline__ RowTargets(const Parameters& params, const QueryPosition& query, int32_t first_entry,
                                        int32_t head_block, int row, const int32_t (&entries)[2])
      : params(params), add(head_block > 0) {
    const int32_t place = query.batch * params.s_q + query.query - static_cast<int32_t>(params.query_begin);
    const int32_t first = Config::kPartials ? place * params.topk + first_entry + row : query.batch * params.s_kv;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t spare = Config::kPartials ? -1 : static_cast<int32_t>(params.kv_rows) + row + 8 * r;
      rows[r] = entries[r] < 0 ? spare : first + (Config::kPartials ? 8 * r : entries[r]);
    }
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
    const bool odd = (lane & 4) != 0;
    Places found;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t own = rows[r];
      found.first[r] = found.second[r] = own;
      if (whole_lines()) {
        const int32_t other = __shfl_xor_sync(0xffffffffu, own, 4);
        found.first[r] = odd ? other : own;
        found.second[r] = odd ? own : other;
      }
    }
    return found;
  }

  // Takes a line's columns of an accumulator with 64 entries as rows, whose first column is `column` of the row. A
  // thread's run of sixteen columns lies as runs.cuh says.
  template <int kCount>
  __device__ __forceinline__ void send_line(const float (&sums)[kCount], const Places& to, int line, int32_t column,
                                            int lane) const {
    const int32_t here = column + line * kLine + (whole_lines() ? (lane & 4) * 4 : 0) + lane % 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float first[4], second[4];
      arrange(sums + line * 16 + 2 * r, first, second, lane);
      // Never so, which ptxas does not know: it would move reductions of other lines in between, and spill.
      if (!Config::kPartials && !Config::kHasRope && to.first[r] < 0) continue;
      write(to.first[r], here, first);
      write(to.second[r], here + (whole_lines() ? 0 : kColumnRun), second);
    }
    __syncwarp();
  }

  template <int kCount>
  __device__ __forceinline__ void send(const float (&sums)[kCount], int32_t column, int lane) const {
    const Places to = places(lane);
#pragma unroll
    for (int line = 0; line < kCount / 16; ++line) send_line(sums, to, line, column, lane);
  }

  // Eight sums of an entry, of two columns in each of four tiles of eight, to two runs' parts of its row; for whole
  // lines to the same part of the even quad's entry and of the odd quad's.
  static __device__ __forceinline__ void arrange(const float* s, float (&first)[4], float (&second)[4], int lane) {
    const bool odd = (lane & 4) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      first[i] = s[i / 2 * 4 + i % 2];
      second[i] = s[8 + i / 2 * 4 + i % 2];
      if (whole_lines()) {
        const float got = __shfl_xor_sync(0xffffffffu, odd ? first[i] : second[i], 4);
        first[i] = odd ? got : first[i];
        second[i] = odd ? second[i] : got;
      }
    }
  }

  __device__ __forceinline__ void write(int32_t row, int32_t column, const float (&four)[4]) const {
    const int64_t start = reinterpret_cast<int64_t>(Config::kPartials ? params.partials : params.sums);
    float* address = reinterpret_cast<float*>(multiply_add_wide(row, Config::kDQk * 4, start)) + column;
    if constexpr (!Config::kPartials) {
      reduce_add_float4(address, four);
    } else if (row >= 0) {
      if (add) {
        // The same thread has written the row before, so nothing is left to chance.
        reduce_add_float4(address, four);
      } else {
        store_float4(address, four);
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
