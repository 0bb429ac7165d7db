// Rows of dKV of a pair of CTAs: how sums leave a consumer's registers, in which order of columns they are kept, and
// dKV from them.
#pragma once

#include "../../common/global_store.cuh"
#include "../../common/math.cuh"
#include "../../common/multiply_wide.cuh"
#include "../../common/opaque.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/sparse_query.cuh"
#include "../dkv_rows.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

// Sums, and stored rows, have their columns in the order of threads: of sixteen columns a thread of a quad has two
// neighbours of either eight, and these four are kept side by side. So no lanes exchange anything.
//
//   column  0 1 2 3 4 5 6 7  8 9 10 11 12 13 14 15
//   place   0 1 4 5 8 9 12 13  2 3 6 7 10 11 14 15
constexpr int kColumnRun = 16;

// To which rows sums of slots that are not valid are added, behind all others: a condition around each reduction would
// cost more than the reduction, and none can stand between products. Nobody reads them.
constexpr int kSpareRows = 64;

// Where a thread's two rows of a block go.
template <typename Config>
struct PairTargets {
  // Of either pair of rows, `row` and the next of its quad's neighbour, eight further down the same: where this thread has
  // its part of a line, the even quad's slot first. Null for rows that are not stored.
  float* rows[2][2];

  // Puts the four columns of each row side by side, then exchanges with the neighbouring quad so that eight lanes have
  // a line of either row.
  template <int kCount>
  static __device__ __forceinline__ void arrange(float (&sums)[kCount], uint32_t thread) {
#pragma unroll
    for (int i = 2; i < kCount; i += 8) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float below = sums[i + c];
        sums[i + c] = sums[i + c + 2];
        sums[i + c + 2] = below;
      }
    }
    // Now sums[8 k + 4 r ..] is run k of row r.
    const bool odd = (thread & 4) != 0;
    if constexpr (kCount >= 16) {
#pragma unroll
      for (int i = 0; i < kCount; i += 16) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& low = sums[i + 4 * r + c];
            float& high = sums[i + 8 + 4 * r + c];
            const float got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
            low = odd ? got : low;     // of the even quad's slot
            high = odd ? high : got;   // of the odd quad's
          }
        }
      }
    }
    sm90::pin_registers(sums);
  }

  // Sends a part of what is arranged of an accumulator with 64 slots as rows, whose first column is `column` of the CTA's:
  // four columns of one row. There are kCount / 4 parts. `adds`: of rows that are stored, whether an earlier pass has
  // written them.
  template <int kCount>
  __device__ __forceinline__ void send(const float (&sums)[kCount], int32_t column, int part, bool adds) const {
    const int r = part % 2, which = part / 2 % 2, line = part / 4;
    const float* s = sums + part * 4;
    const float four[4] = {s[0], s[1], s[2], s[3]};
    float* place = rows[r][which] + column + line * 2 * kColumnRun;
    if (!Config::kPartials) {
      reduce_add_float4(place, four);
    } else if (rows[r][which] != nullptr) {
      if (adds) {
        reduce_add_float4(place, four);
      } else {
        store_float4(place, four);
      }
    }
  }

  // Half a line, of this thread's own rows, not exchanged.
  __device__ __forceinline__ void send_half(const float (&sums)[8], int32_t column, bool adds, uint32_t thread) const {
    const bool odd = (thread & 4) != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float four[4] = {sums[4 * r], sums[4 * r + 1], sums[4 * r + 2], sums[4 * r + 3]};
      float* own = odd ? rows[r][1] - kColumnRun : rows[r][0];
      if (Config::kPartials && (odd ? rows[r][1] : rows[r][0]) == nullptr) continue;
      if (!Config::kPartials || adds) {
        reduce_add_float4(own + column, four);
      } else {
        store_float4(own + column, four);
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void send_all(const float (&sums)[kCount], int32_t column, bool adds) const {
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) send(sums, column, part, adds);
  }
};

// What stage `zero` has besides: what is added to them is read.
template <int kDQk>
__device__ __forceinline__ void zero_spare_rows(const Parameters& params) {
  if (blockIdx.x != 0) return;
  float4* start = reinterpret_cast<float4*>(params.sums + params.kv_rows * kDQk);
  for (int i = threadIdx.x; i < kSpareRows * kDQk / 4; i += kRowThreads) start[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

__device__ __forceinline__ void store_eight(uint8_t* to, int chunk, const float2 (&pairs)[4], float) {
  float4* line = reinterpret_cast<float4*>(to) + 2 * chunk;
  line[0] = make_float4(pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y);
  line[1] = make_float4(pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y);
}

template <typename Element>
__device__ __forceinline__ void store_eight(uint8_t* to, int chunk, const float2 (&pairs)[4], Element) {
  reinterpret_cast<uint4*>(to)[chunk] =
      make_uint4(pack_pair<Element>(pairs[0].x, pairs[0].y), pack_pair<Element>(pairs[1].x, pairs[1].y),
                 pack_pair<Element>(pairs[2].x, pairs[2].y), pack_pair<Element>(pairs[3].x, pairs[3].y));
}

// Stage `round` of sums in that order. Element: dkv's, also float.
template <int kDQk, typename Element>
__device__ __forceinline__ void round_runs(const Parameters& params) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < params.kv_rows; row += row_stride()) {
    const int64_t batch = row / params.s_kv, token = row % params.s_kv;
    const float2* from =
        reinterpret_cast<const float2*>(params.sums + batch * params.sums_batch + token * params.sums_token);
    uint8_t* to = params.dkv + batch * params.dkv_batch_bytes + token * params.dkv_token_bytes;
    for (int chunk = lane; chunk < kDQk / 8; chunk += 32) {
      float2 pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) pairs[pair] = from[chunk / 2 * 8 + pair * 2 + chunk % 2];
      store_eight(to, chunk, pairs, Element{});
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
