// A consumer of stage `dq`: rows are the heads of a column tile, and the keys that they see stream by.
//
//   dweights += gradient relu(z)     in registers
//   dq       += (gradient [z > 0]) k
//
// A head's weight multiplies the fp32 sum at the end. fp16 operands are scaled by a power of two, so that the largest
// of a row is near 2^14; what is below 2^-38 of it vanishes.
#pragma once

#include "gradient_consumer.cuh"

namespace cupymla::indexer_loss_dense {

struct DqConsumer : GradientConsumer<DqStorage> {
  using GradientConsumer<DqStorage>::GradientConsumer;

  float dweights[2] = {0.0f, 0.0f};

  __device__ __forceinline__ void run() {
    const ColumnTile tile = GradientProducer<DqStorage>::dq_tile(params, warpgroup_idx);
    // A warp's sixteen heads are of one row.
    const int row_in_tile = warp * 16 / kHeads;
    const int32_t row = tile.first_row + row_in_tile;
    const float scale = operand_scale(kScaled ? params.largest[row] : 0.0f);
    begin();
    const bool splits_keys = params.splits_keys != 0;
    const int own = splits_keys ? 0 : warpgroup_idx;
    float products[kScores];
    Terms terms;
    if (splits_keys && warpgroup_idx == 1) skip();
#pragma unroll 1
    for (int stage; next(products, stage);) {
      make_terms(products, terms, storage.gradients[stage][own][row_in_tile], scale);
      issue_second(terms, stage);
      if (splits_keys) skip();
    }
    if (splits_keys) merge();
    const int32_t number = static_cast<int32_t>(blockIdx.x) * kConsumers + warpgroup_idx;
    const bool stores = splits_keys ? warpgroup_idx == 0 : number < column_tiles(params.queries, params.heads);
    if (stores && row < params.queries) store(row, tile.first_head + warp * 16 % kHeads, 1.0f / scale);
  }

 private:
  // Adds what the other consumer has, of every second tile of keys.
  __device__ __forceinline__ void merge() {
    const int thread = static_cast<int>(threadIdx.x) % RoleWarpgroups::kWarpgroup;
    if (warpgroup_idx == 1) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) storage.merged[i][thread] = sums[i];
      storage.merged[kD / 2][thread] = dweights[0];
      storage.merged[kD / 2 + 1][thread] = dweights[1];
    }
    named_barrier_sync(1, RoleWarpgroups::kConsumerThreads);
    if (warpgroup_idx == 1) return;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) sums[i] += storage.merged[i][thread];
    dweights[0] += storage.merged[kD / 2][thread];
    dweights[1] += storage.merged[kD / 2 + 1][thread];
  }

  __device__ __forceinline__ void make_terms(const float (&products)[kScores], Terms& terms,
                                             const float (&gradients)[kTileKeys], float scale) {
    const float floor = params.relu != 0 ? 0.0f : negative_infinity();
    const bool always = params.relu == 0;
#pragma unroll
    for (int group = 0; group < kTileKeys / 8; ++group) {
      const float2 gradient = *reinterpret_cast<const float2*>(&gradients[group * 8 + lane % 4 * 2]);
      const uint32_t operand = pack_pair<Element>(kScaled ? gradient.x * scale : gradient.x,
                                                  kScaled ? gradient.y * scale : gradient.y);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = products[group * 4 + half * 2], second = products[group * 4 + half * 2 + 1];
        dweights[half] = fmaf(gradient.x, max_nan(first, floor), dweights[half]);
        dweights[half] = fmaf(gradient.y, max_nan(second, floor), dweights[half]);
        terms[group / 2][group % 2 * 2 + half] = operand & active(first, second, always);
      }
    }
  }

  // `first_head`: of this warp's sixteen.
  __device__ __forceinline__ void store(int32_t row, int32_t first_head, float unit) {
    const int32_t state = params.states[row];
    const float nan = __int_as_float(0x7fffffff);
    const int quad_lane = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t head = first_head + half * 8 + lane / 4;
      const bool there = head < params.heads;
      const float dweight = state == kSpoilt ? nan : quad_sum(dweights[half]);
      float factor = 0.0f;
      if (there && state == kSound) factor = weight_of(params, row, head) * unit;
      if (state == kSpoilt) factor = nan;
      if (there && quad_lane == 0) store_dweight(row, head, dweight);
      uint8_t* to = reinterpret_cast<uint8_t*>(params.dq + row * params.dq_query + head * params.dq_head);
#pragma unroll
      for (int first = 0; first < kD / 8; first += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (first + i) * 4 + half * 2;
          words[i] = pack_pair<Element>(sums[at] * factor, sums[at + 1] * factor);
        }
        // From two channels of four groups to the eight of one.
        quad_transpose(words, quad_lane);
        if (there) store_uint4(to + (first + quad_lane) * 16, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }

  __device__ __forceinline__ void store_dweight(int32_t row, int32_t head, float sum) const {
    const int64_t place = row * params.dweights_query + head * params.dweights_head;
    if (params.bf16_weights != 0) {
      reinterpret_cast<__nv_bfloat16*>(params.dweights)[place] = __float2bfloat16_rn(sum);
    } else {
      reinterpret_cast<float*>(params.dweights)[place] = sum;
    }
  }
};

}  // namespace cupymla::indexer_loss_dense
