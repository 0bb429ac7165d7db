// A consumer of stage `dk`: rows are keys, and the column tiles of rows that see some of them stream by.
//
//   dk += (gradient w [z > 0]) q
//
// fp16 operands are scaled by a power of two, so that the largest of the row block is near 2^14; what is below 2^-38 of
// it vanishes.
#pragma once

#include "gradient_consumer.cuh"

namespace cupymla::indexer_loss_dense {

struct DkConsumer : GradientConsumer<DkStorage> {
  using GradientConsumer<DkStorage>::GradientConsumer;

  __device__ __forceinline__ void run(int32_t first_key, int32_t slice) {
    bool spoilt[2] = {false, false};
    begin();
    float products[kScores];
    Terms terms;
#pragma unroll 1
    for (int stage; next(products, stage);) {
      make_terms(products, terms, stage);
      issue_second(terms, stage);
      if (storage.spoilt[stage] != 0) spoil(spoilt, first_key, storage.spoilt[stage], storage.first[stage]);
    }
    store(spoilt, first_key + warpgroup_idx * kTileKeys, slice);
  }

 private:
  __device__ __forceinline__ void make_terms(const float (&products)[kScores], Terms& terms, int stage) const {
    const bool always = params.relu == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float gradients[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        gradients[row] = storage.gradients[stage][row][warpgroup_idx * kTileKeys + own_row(half)];
      }
#pragma unroll
      for (int group = 0; group < kColumnGroups; ++group) {
        const float gradient = gradients[group / kRowGroups];
        const float2 weights = *reinterpret_cast<const float2*>(&storage.weights[stage][group * 8 + lane % 4 * 2]);
        const uint32_t mask = active(products[group * 4 + half * 2], products[group * 4 + half * 2 + 1], always);
        terms[group / 2][group % 2 * 2 + half] =
            pack_pair<Element>(gradient * weights.x, gradient * weights.y) & mask;
      }
    }
  }

  // Notes keys that rows see which are not finite.
  __device__ __forceinline__ void spoil(bool (&spoilt)[2], int32_t first_key, uint32_t rows, int32_t first_row) const {
    for (; rows != 0; rows &= rows - 1) {
      const int32_t* bounds = params.bounds + (first_row + __ffs(static_cast<int>(rows)) - 1) * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t key = first_key + warpgroup_idx * kTileKeys + own_row(half);
        if (bounds[0] <= key && key < bounds[1]) spoilt[half] = true;
      }
    }
  }

  __device__ __forceinline__ void store(const bool (&spoilt)[2], int32_t first_key, int32_t slice) const {
    const float unit = 1.0f / operand_scale(kScaled ? *params.largest_term : 0.0f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = params.sums + (slice * params.row_stride + first_key + own_row(half)) * kD + lane % 4 * 2;
      const float factor = spoilt[half] ? __int_as_float(0x7fffffff) : unit;
#pragma unroll
      for (int group = 0; group < kD / 8; ++group) {
        float2 sum = make_float2(sums[group * 4 + half * 2] * factor, sums[group * 4 + half * 2 + 1] * factor);
        float2* place = reinterpret_cast<float2*>(to + group * 8);
        if (params.adds != 0) {
          const float2 before = *place;
          sum = make_float2(before.x + sum.x, before.y + sum.y);
        }
        *place = sum;
      }
    }
  }
};

}  // namespace cupymla::indexer_loss_dense
