// Rows of dKV of a 2-CTA cluster, and of two phases: how sums leave a consumer's registers.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/sparse_query.cuh"
#include "../packed_columns.cuh"
#include "../params.cuh"
#include "runs.cuh"

namespace cupymla::sparse_mla_bwd {

// Puts the four columns of each row of an accumulator side by side. With kLines neighbouring quads exchange halves, so
// that eight lanes have a line of 128 bytes of the even quad's row, and then one of the odd quad's: reductions count by
// number. In place, as these take their registers.
template <bool kLines, int kCount>
__device__ __forceinline__ void arrange_runs(float (&sums)[kCount], uint32_t thread) {
#pragma unroll
  for (int i = 2; i < kCount; i += 8) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float below = sums[i + c];
      sums[i + c] = sums[i + c + 2];
      sums[i + c + 2] = below;
    }
  }
  if constexpr (kLines) {
    const bool odd = (thread & 4) != 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 16) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float& low = sums[i + c];
        float& high = sums[i + 8 + c];
        const float got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
        low = odd ? got : low;
        high = odd ? high : got;
      }
    }
  }
  sm90::warpgroup_fence_operand(sums);
}

// Where a thread's rows of a block go: `row` of its quad and of the neighbouring one, and eight further down the same.
// Rows that are stored leave by halves of lines, which measured faster.
template <typename Config>
struct PlainRowTargets {
  static constexpr bool kLines = !Config::kPartials;
  static constexpr int kTileParts = 8;

  template <int kCount>
  static __device__ __forceinline__ void arrange(float (&sums)[kCount], uint32_t thread) {
    arrange_runs<kLines>(sums, thread);
  }
  static __device__ __forceinline__ void arrange_half(float (&sums)[8], uint32_t thread) {
    arrange_runs<false>(sums, thread);
  }

  int32_t rows[2][2];  // first the even quad's; where they are stored its own, negative where it is not
  int64_t here;        // this thread's part of row 0

  // `own`: this thread's two rows, counted over all batch entries. `column`: the first of those that are sent.
  __device__ __forceinline__ PlainRowTargets(const Parameters& params, const int32_t (&own)[2], int32_t column,
                                             uint32_t thread) {
    const bool odd = (thread & 4) != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[r][0] = rows[r][1] = own[r];
      if (kLines) {
        const int32_t other = __shfl_xor_sync(0xffffffffu, own[r], 4);
        rows[r][0] = odd ? other : own[r];
        rows[r][1] = odd ? own[r] : other;
      }
    }
    const float* start = Config::kPartials ? params.partials : params.sums;
    if (kLines) start += (thread & 4) * (kColumnRun / 4);
    here = reinterpret_cast<int64_t>(start + column + thread % 4 * 4);
    make_opaque(here);
  }

  // Sends a part of what is arranged of a tile: four columns of one row. There are kTileParts. `adds`: of rows that are
  // stored, whether an earlier head block has written them.
  __device__ __forceinline__ void send(const float (&sums)[4 * kTileParts], int part, bool adds) const {
    if constexpr (kLines) {
      const int line = part % 2, r = part / 2 % 2, which = part / 4;
      put(rows[r][which], line * 2 * kColumnRun, sums + line * 16 + which * 8 + r * 4, adds);
    } else {
      const int run = part % 4, r = part / 4;
      put(rows[r][0], run * kColumnRun, sums + run * 8 + r * 4, adds);
    }
  }

  // Half a line of this thread's own rows, of the RoPE.
  __device__ __forceinline__ void send_half(const float (&sums)[8], bool adds, uint32_t thread) const {
    const bool odd = (thread & 4) != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      put(odd ? rows[r][1] : rows[r][0], kLines && odd ? -kColumnRun : 0, sums + 4 * r, adds);
    }
  }

  // Rows lie in a workspace without gaps, so an address is one multiplication of 32-bit numbers.
  __device__ __forceinline__ void put(int32_t row, int32_t column, const float* s, bool adds) const {
    float* address = reinterpret_cast<float*>(multiply_add_wide(row, Config::kDQk * 4, here)) + column;
    const float four[4] = {s[0], s[1], s[2], s[3]};
    if (!Config::kPartials) {
      reduce_add_float4(address, four);
    } else if (row >= 0) {
      if (adds) {
        // The same thread has written the row before, so nothing is left to chance.
        reduce_add_float4(address, four);
      } else {
        store_float4(address, four);
      }
    }
  }
};

// Where rows go that are packed: eight columns of a thread leave at once.
//
// Of 32 columns of the values a thread of a quad has two neighbours of every eight, and these are packed together, so
// sums lie in the order of runs if threads' halves of eight sums take turns (`sum_packed_rows`). The RoPE comes by
// sixteen columns: neighbouring threads exchange halves of their two rows, which then lie in the order of runs.
template <typename Config>
struct PackedRowTargets {
  static constexpr int kGroup = 32;
  static constexpr int kTileParts = 4;

  int32_t rows[2];  // where they are stored, negative where they are not
  int64_t here;     // the quad's first column of row 0
  uint32_t thread;

  __device__ __forceinline__ PackedRowTargets(const Parameters& params, const int32_t (&own)[2], int32_t column,
                                              uint32_t thread)
      : rows{own[0], own[1]}, here(reinterpret_cast<int64_t>(params.partials) + column * 2), thread(thread) {
    make_opaque(here);
  }

  // Nothing to arrange: what is packed may lie anywhere.
  template <int kCount>
  static __device__ __forceinline__ void arrange(float (&)[kCount], uint32_t) {}

  // Afterwards an even thread has eight columns of the upper row, an odd one of the lower row.
  static __device__ __forceinline__ void arrange_half(float (&sums)[8], uint32_t thread) {
    arrange_runs<false>(sums, thread);
    const bool odd = (thread & 1) != 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float got = __shfl_xor_sync(0xffffffffu, odd ? sums[c] : sums[4 + c], 1);
      const float upper = sums[c], lower = sums[4 + c];
      sums[c] = odd ? got : upper;
      sums[4 + c] = odd ? lower : got;
    }
  }

  // Rows are written in one head block alone, so nothing is ever added to them.
  __device__ __forceinline__ void send(const float (&sums)[32], int part, bool) const {
    const int group = part % 2, r = part / 2;
    float eight[kPackedColumns];
#pragma unroll
    for (int i = 0; i < kPackedColumns; ++i) eight[i] = sums[(group * 4 + i / 2) * 4 + r * 2 + i % 2];
    put(rows[r], group * kGroup + thread % 4 * kPackedColumns, eight);
  }
  __device__ __forceinline__ void send_half(const float (&sums)[8], bool, uint32_t) const {
    put((thread & 1) != 0 ? rows[1] : rows[0], thread % 4 / 2 * kPackedColumns, sums);
  }

  __device__ __forceinline__ void put(int32_t row, int32_t column, const float (&eight)[kPackedColumns]) const {
    if (row >= 0) put_packed(row, column, pack_columns(eight));
  }

  // What is packed already.
  __device__ __forceinline__ void put_packed(int32_t row, int32_t column, const uint4& packed) const {
    if (row < 0) return;
    store_uint4(reinterpret_cast<uint8_t*>(multiply_add_wide(row, Config::kDQk * 2, here)) + column * 2, packed);
  }
};

template <typename Config>
using ClusterRowTargets = conditional_t<Config::kPacked, PackedRowTargets<Config>, PlainRowTargets<Config>>;

}  // namespace cupymla::sparse_mla_bwd
