// How sums of dKV leave a warpgroup's accumulators.
#pragma once

#include "../../common/opaque.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// Where sums of a block's dKV rows go: added to the token's row, or stored in the slot's own.
template <typename Config>
struct RowTargets {
  float* rows[2];  // of this thread's two slots; null where there is nothing to write
  bool add;        // in partials: whether an earlier pass has written them

  RowTargets() = default;
  __device__ __forceinline__ RowTargets(const Parameters& params, const QueryPosition& query, int32_t first_slot,
                                        int32_t pass, int row, const int32_t (&slots)[2])
      : add(pass > 0) {
    const int64_t place = static_cast<int64_t>(query.batch) * params.s_q + query.query - params.query_begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* start = Config::kPartials
                         ? params.partials + (place * params.topk + first_slot + row + 8 * r) * Config::kDQk
                         : params.sums + query.batch * params.sums_batch + slots[r] * params.sums_token;
      rows[r] = slots[r] >= 0 ? start : nullptr;
    }
  }

  static constexpr int kGroup = 16;  // columns that are sent at a time

  // Takes a group of columns of an accumulator with 64 slots as rows, whose first column is `column` of the row.
  // Neighbouring lanes exchange halves, so that each has four columns in a row of one slot.
  template <int kCount>
  __device__ __forceinline__ void send_group(const float (&sums)[kCount], int group, int32_t column, int lane) {
    const bool odd = (lane & 1) != 0;
    const int32_t lane_column = column + group * kGroup + (odd ? 8 : 0) + (lane % 4 / 2) * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* left = sums + group * 8 + 2 * r;
      const float* right = left + 4;
      const float x = __shfl_xor_sync(0xffffffffu, odd ? left[0] : right[0], 1);
      const float y = __shfl_xor_sync(0xffffffffu, odd ? left[1] : right[1], 1);
      const float four[4] = {odd ? x : left[0], odd ? y : left[1], odd ? right[0] : x, odd ? right[1] : y};
      if (rows[r] != nullptr) write(rows[r] + lane_column, four);
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void send(const float (&sums)[kColumns / 2], int32_t column, int lane) {
#pragma unroll
    for (int group = 0; group < kColumns / kGroup; ++group) send_group(sums, group, column, lane);
  }

  // Sums whose columns lie so that a thread has four in a row of each slot in every sixteen (see `order_columns`): nothing
  // has to be exchanged.
  template <int kCount>
  __device__ __forceinline__ void send_ordered(const float (&sums)[kCount], int32_t column, int lane) const {
    const int32_t lane_column = column + lane % 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows[r] == nullptr) continue;
      float* start = rows[r] + lane_column;
#pragma unroll
      for (int group = 0; group < kCount / 8; ++group) {
        const float* s = sums + group * 8 + r * 2;
        const float four[4] = {s[0], s[1], s[4], s[5]};
        write(start + group * kGroup, four);
      }
    }
  }

  // The same of a whole tile, exchanged before any of it is sent: a shuffle waits in one queue with the reductions
  // ahead of it, and these find their registers and addresses as they are. A single CTA has no registers for it.
  template <int kCount>
  __device__ __forceinline__ void send_arranged(float (&sums)[kCount], int32_t column, int lane) const {
    make_opaque(lane);  // or what follows from it is kept, and spilled, from block to block
#pragma unroll
    for (int group = 0; group < kCount / 8; ++group) arrange(sums + group * 8, lane);
    const int32_t lane_column = column + (lane & 1) * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows[r] == nullptr) continue;
      int32_t here = lane_column;
      make_opaque(here);  // or both addresses are worked out at once
      float* start = rows[r] + here;
#pragma unroll
      for (int group = 0; group < kCount / 8; ++group) {
        const float* s = sums + group * 8 + r * 4;
        const float four[4] = {s[0], s[1], s[2], s[3]};
        write(start + group * kGroup, four);
      }
    }
  }

  // Neighbouring lanes exchange halves of a group, so that each has four columns in a row of the upper slot, then of
  // the lower one.
  static __device__ __forceinline__ void arrange(float* s, int lane) {
    const bool odd = (lane & 1) != 0;
    float got[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) got[i] = __shfl_xor_sync(0xffffffffu, odd ? s[i] : s[i + 4], 1);
    const float upper[4] = {odd ? got[0] : s[0], odd ? got[1] : s[1], odd ? s[4] : got[0], odd ? s[5] : got[1]};
    const float lower[4] = {odd ? got[2] : s[2], odd ? got[3] : s[3], odd ? s[6] : got[2], odd ? s[7] : got[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = upper[i];
      s[i + 4] = lower[i];
    }
  }

  __device__ __forceinline__ void write(float* address, const float (&four)[4]) const {
    if (Config::kPartials && !add) {
      *reinterpret_cast<float4*>(address) = make_float4(four[0], four[1], four[2], four[3]);
    } else {
      // In partials the same thread has written the row before, so nothing is left to chance.
      reduce_add_float4(address, four);
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
