// A consumer of stage `dq`: it goes through the keys that its column tile sees:
//
//   z          = K q^T                    64 keys x 64 columns
//   dweights  += gradient relu(z)         in registers: a thread has two keys, two columns of each eight
//   dq^T      += K^T (gradient [z > 0])   gradient [z > 0] from shared memory, a row per column
//
// The gradient is a 16-bit operand, rounded once; a head's weight multiplies the fp32 sum at the end. fp16 operands are
// scaled by a power of two, so that the largest of a row is near 2^14; what is below 2^-38 of it vanishes.
#pragma once

#include "gradient_consumer.cuh"

namespace cupymla::indexer_loss_dense {

struct DqConsumer : GradientConsumer<DqStorage> {
  using GradientConsumer<DqStorage>::GradientConsumer;

  float dq[kDTiles][kScores];
  float dweights[kColumnGroups][2];
  float scale[kRows];
  uint32_t turn = 0;  // which of `active`

  __device__ __forceinline__ void run() {
    const ColumnTile tile = GradientProducer<DqStorage>::dq_tile(params, warpgroup_idx);
#pragma unroll
    for (int row = 0; row < kRows; ++row) scale[row] = operand_scale(params.largest[tile.first_row + row]);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
#pragma unroll
      for (int column = 0; column < kDTiles; ++column) dq[column][i] = 0.0f;
    }
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) dweights[group][0] = dweights[group][1] = 0.0f;
    storage.kept_full.wait(0);
    float products[kScores];
#pragma unroll 1
    for (int stage; next(products, stage);) {
#pragma unroll
      for (int column = 0; column < kDTiles; ++column) sm90::warpgroup_fence_operand(dq[column]);
      activate(products, stage);
      fence_async_shared();
      meet();
      issue(stage);
      turn ^= 1;
    }
#pragma unroll
    for (int column = 0; column < kDTiles; ++column) sm90::warpgroup_fence_operand(dq[column]);
    if (static_cast<int32_t>(blockIdx.x) * kConsumers + warpgroup_idx < column_tiles(params.queries, params.heads)) {
      store(tile);
    }
  }

 private:
  __device__ __forceinline__ void meet() const { named_barrier_sync(1 + warpgroup_idx, GradientWarpgroups::kWarpgroup); }

  __device__ __forceinline__ void activate(const float (&products)[kScores], int stage) {
    const float floor = params.relu != 0 ? 0.0f : negative_infinity();
    const bool always = params.relu == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of column lane / 4; eight columns on, the pattern is the same.
      uint8_t* place = storage.active[warpgroup_idx][turn] + swizzle_128(lane / 4, warp * 2 + half) + lane % 4 * 4;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float gradient = storage.gradients[stage][warpgroup_idx][row][own_key(half)];
        const float scaled = kScaled ? gradient * scale[row] : gradient;
        const uint32_t operand = pack_pair<Element>(scaled, scaled);
#pragma unroll
        for (int group = row * kRowGroups; group < (row + 1) * kRowGroups; ++group) {
          const float first = products[group * 4 + half * 2], second = products[group * 4 + half * 2 + 1];
          dweights[group][0] = fmaf(gradient, max_nan(first, floor), dweights[group][0]);
          dweights[group][1] = fmaf(gradient, max_nan(second, floor), dweights[group][1]);
          // Rows are columns behind this, columns keys.
          *reinterpret_cast<uint32_t*>(place + group * kSwizzleAtomBytes) =
              transpose_matrix(operand & active(first, second, always));
        }
      }
    }
  }

  __device__ __forceinline__ void issue(int stage) {
    const uint64_t gradients = sm90::k_major_descriptor(indexer::uniform_address(storage.active[warpgroup_idx][turn]));
    const uint64_t keys = sm90::mn_major_descriptor(indexer::uniform_address(storage.streamed[stage][0]), kTileBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int column = 0; column < kDTiles; ++column) {
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step) {
        sm90::mma<indexer::Products<Element, kColumns>::Transposed>(
            dq[column], sm90::descriptor_advance(keys, column * kTileBytes + step * 2 * kSwizzleAtomBytes),
            sm90::descriptor_advance(gradients, step * 32));
      }
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void store(const ColumnTile& tile) {
    auto& sums = storage.dweights[warpgroup_idx];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = dweights[group][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane < 4) sums[warp][group * 8 + lane * 2 + i] = sum;
      }
    }
    // Through shared memory, from rows that are channels to rows that are heads.
    auto& rows = storage.out[warpgroup_idx];
#pragma unroll
    for (int group = 0; group < kColumnGroups; ++group) {
      const int own_row = group / kRowGroups;
      const int32_t row = tile.first_row + own_row;
      const int32_t state = params.states[row];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t head = tile.first_head + group % kRowGroups * 8 + lane % 4 * 2 + i;
        float factor = 0.0f;
        if (state == kSound && head < params.heads) factor = weight_of(params, row, head) / scale[own_row];
        if (state == kSpoilt) factor = __int_as_float(0x7fffffff);
#pragma unroll
        for (int column = 0; column < kDTiles; ++column) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            rows[group * 8 + lane % 4 * 2 + i][column * 64 + own_key(half)] =
                static_cast<Element>(dq[column][group * 4 + half * 2 + i] * factor);
          }
        }
      }
    }
    meet();
    const int thread = static_cast<int>(threadIdx.x) % GradientWarpgroups::kWarpgroup;
    if (thread < kColumns) {
      const int32_t row = tile.first_row + thread / kHeads, head = tile.first_head + thread % kHeads;
      if (row < params.queries && head < params.heads) {
        store_dweight(row, head, (sums[0][thread] + sums[1][thread]) + (sums[2][thread] + sums[3][thread]));
      }
    }
    constexpr int kChunks = kD / 8;
#pragma unroll 4
    for (int chunk = thread; chunk < kColumns * kChunks; chunk += GradientWarpgroups::kWarpgroup) {
      const int column = chunk / kChunks, part = chunk % kChunks * 8;
      const int32_t row = tile.first_row + column / kHeads, head = tile.first_head + column % kHeads;
      if (row >= params.queries || head >= params.heads) continue;
      store_uint4(reinterpret_cast<uint8_t*>(params.dq + row * params.dq_query + head * params.dq_head + part),
                  *reinterpret_cast<const uint4*>(&rows[column][part]));
    }
  }

  __device__ __forceinline__ void store_dweight(int32_t row, int32_t head, float sum) const {
    if (params.states[row] == kSpoilt) sum = __int_as_float(0x7fffffff);
    const int64_t place = row * params.dweights_query + head * params.dweights_head;
    if (params.bf16_weights != 0) {
      reinterpret_cast<__nv_bfloat16*>(params.dweights)[place] = __float2bfloat16_rn(sum);
    } else {
      reinterpret_cast<float*>(params.dweights)[place] = sum;
    }
  }
};

}  // namespace cupymla::indexer_loss_dense
