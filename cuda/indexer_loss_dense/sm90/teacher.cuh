// A consumer of stages `lse` and `target`.
#pragma once

#include "../../attn_dist/sm90/products.cuh"
#include "../../common/indexer_score.cuh"
#include "../../common/ring.cuh"
#include "row_bounds.cuh"
#include "teacher_storage.cuh"

namespace cupymla::indexer_loss_dense {

// A thread's rows of a product are r and r + 8 of its warp's sixteen, r = lane / 4; of each eight columns it has two.
struct TeacherConsumer {
  TeacherStorage& storage;
  const Parameters& params;
  const int warpgroup_idx;
  const int warp = static_cast<int>(threadIdx.x / 32 % 4), lane = static_cast<int>(threadIdx.x % 32);
  attn_dist::Products<TeacherConfig, Element> products;  // q of it: the fragments of 64 rows, of heads or keys
  Ring<TeacherConfig::kBuffers> ring;
  uint32_t tiles = 0;  // so far

  __device__ __forceinline__ TeacherConsumer(TeacherStorage& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage), params(params), warpgroup_idx(warpgroup_idx) {}

  // Of this thread's row in a half, among the consumer's 64.
  __device__ __forceinline__ int own_row(int half) const { return warp * 16 + half * 8 + lane / 4; }

  // Takes in the rows of both consumers; false where there is nothing to do.
  __device__ __forceinline__ bool begin() {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      storage.full[ring.stage].wait(ring.full);
      if (storage.streamed[ring.stage].first < 0) return false;
      if (consumer == warpgroup_idx) products.load(storage.tiles[ring.stage][0], warp, lane);
      ring.advance();
    }
    return true;
  }

  // Products with the next tile; false where there is none. The tile is to be let go of by `free_tile`.
  __device__ __forceinline__ bool next(float (&scores)[kScores], Streamed& streamed) {
    storage.full[ring.stage].wait(ring.full);
    streamed = storage.streamed[ring.stage];
    if (streamed.first < 0) return false;
    const uint64_t columns = decltype(products)::descriptor(storage.tiles[ring.stage][0]);
    // A fresh mbarrier counts as having completed the phase before its first: the first consumer may begin.
    storage.order[warpgroup_idx].wait((tiles ^ (warpgroup_idx == 0 ? 1u : 0u)) & 1u);
    products.issue(scores, columns, [&](int tile) {
      if (tile == TeacherConfig::kOrderTile) storage.order[1 - warpgroup_idx].arrive();
    });
    if (tiles == 0) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) storage.free[consumer].arrive();
    }
    ++tiles;
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
    return true;
  }

  __device__ __forceinline__ void free_tile() {
    storage.free[ring.stage].arrive();
    ring.advance();
  }

  // Log-sum-exps of this consumer's column tile: a thread's own largest score and sum of its columns; four lanes have
  // all keys.
  __device__ __forceinline__ void run_lse() {
    if (!begin()) return;
    const ColumnTile tile(static_cast<int32_t>(blockIdx.x) * kConsumers + warpgroup_idx, params.mla_heads);
    Bounds bounds[2];
    float largest[2], sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bounds[half] = visible_keys(params, tile.first_row + own_row(half) / kHeads);
      largest[half] = negative_infinity();
      sum[half] = 0.0f;
    }
    float scores[kScores];
#pragma unroll 1
    for (Streamed streamed; next(scores, streamed); free_tile()) {
      const Bounds inner{max(bounds[0].begin, bounds[1].begin), min(bounds[0].end, bounds[1].end)};
      const bool whole = streamed.first >= inner.begin && streamed.first + kTileKeys <= inner.end;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (whole) {
          add_scores<true>(scores, half, streamed.first, bounds[half], largest[half], sum[half]);
        } else {
          add_scores<false>(scores, half, streamed.first, bounds[half], largest[half], sum[half]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // `quad_max` would let a NaN through, which a sum has as well.
      float all = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
      all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, 2));
      const float base = all == negative_infinity() ? 0.0f : all;
      const float total = quad_sum(sum[half] * exp2_approx(largest[half] - base));
      const int row = tile.first_row + own_row(half) / kHeads, head = tile.first_head + own_row(half) % kHeads;
      if (lane % 4 == 0 && row < params.queries && head < params.mla_heads) {
        const bool empty = total == 0.0f;
        params.lse[static_cast<int64_t>(row) * params.mla_heads + head] =
            make_float2(empty ? positive_infinity() : base, empty ? 0.0f : 1.0f / total);
      }
    }
  }

  // Sums over heads at this consumer's keys.
  __device__ __forceinline__ void run_target(int32_t first_key) {
    if (!begin()) return;
    float* target = params.target + first_key + warpgroup_idx * kTileKeys + own_row(0);
    float sums[kRows][2] = {};
    float scores[kScores];
#pragma unroll 1
    for (Streamed streamed; next(scores, streamed); free_tile()) {
      if (streamed.heads < kHeads) drop_missing_heads(scores, streamed.heads);
      const Log2Lse* lse = storage.lse[ring.stage];
#pragma unroll
      for (int group = 0; group < kColumnGroups; ++group) {
        const float4 two = *reinterpret_cast<const float4*>(lse + group * 8 + lane % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& sum = sums[group / kRowGroups][half];
          sum = fmaf(power(scores[group * 4 + half * 2], two.x), two.y, sum);
          sum = fmaf(power(scores[group * 4 + half * 2 + 1], two.z), two.w, sum);
        }
      }
      if (streamed.heads <= kHeads) write(sums, target + streamed.first * params.row_stride);
    }
  }

 private:
  // Adds a row's scores to its sum of exponentials; kWhole: all of them are visible.
  template <bool kWhole>
  __device__ __forceinline__ void add_scores(const float (&scores)[kScores], int half, int32_t first_key,
                                             const Bounds& bounds, float& largest, float& sum) const {
    const auto is_seen = [&](int i) {
      const int32_t key = first_key + i / 2 * 8 + lane % 4 * 2 + i % 2;
      return kWhole || (bounds.begin <= key && key < bounds.end);
    };
    float grown = largest;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float score = __fmul_rn(scores[i / 2 * 4 + half * 2 + i % 2], params.scale_log2);
      if (is_seen(i)) grown = fmaxf(grown, score);
    }
    const float base = grown == negative_infinity() ? 0.0f : grown;
    float added = 0.0f;
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float part = power(scores[i / 2 * 4 + half * 2 + i % 2], base);
      if (is_seen(i)) added += part;
    }
    sum = fmaf(sum, exp2_approx(largest - base), added);
    largest = grown;
  }

  __device__ __forceinline__ float power(float product, float lse) const {
    return exp2_approx(fmaf(product, params.scale_log2, -lse));
  }

  // Their products are zero, but not with an infinite key.
  __device__ __forceinline__ void drop_missing_heads(float (&scores)[kScores], int32_t heads) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if ((i / 4 * 8 + lane % 4 * 2 + i % 2) % kHeads >= heads) scores[i] = 0.0f;
    }
  }

  // Adds what four lanes have of each row and key, writes it and begins anew.
  __device__ __forceinline__ void write(float (&sums)[kRows][2], float* target) const {
    const int quad_lane = lane % 4;
    if constexpr (kRows == 1) {
      const float sum = indexer::add_sums_of_two(sums[0], quad_lane);
      if (quad_lane < 2) __stcg(target + quad_lane * 8, sum);
    } else {
#pragma unroll
      for (int row = 0; row < kRows; row += 2) {
        const float four[4] = {sums[row][0], sums[row][1], sums[row + 1][0], sums[row + 1][1]};
        const float sum = indexer::add_sums_of_four(four, quad_lane);
        __stcg(target + (row + quad_lane / 2) * params.row_stride + quad_lane % 2 * 8, sum);
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = 0.0f;
  }
};

}  // namespace cupymla::indexer_loss_dense
