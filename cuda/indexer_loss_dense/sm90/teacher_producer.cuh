// The producer warp of stages `lse` and `target`.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "row_groups.cuh"
#include "teacher_storage.cuh"

namespace cupymla::indexer_loss_dense {

struct TeacherProducer {
  TeacherStorage& storage;
  const Parameters& params;
  const TensorMap& heads_map;
  const TensorMap& keys_map;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<TeacherConfig::kBuffers> ring;

  // MLA heads of the two column tiles of this CTA, then the keys that their rows see.
  __device__ __forceinline__ void run_lse() {
    Bounds any{0, 0};
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const ColumnTile tile(static_cast<int32_t>(blockIdx.x) * kConsumers + consumer, params.mla_heads);
      const Bounds own = visible_to_any<kRows>(params, tile.first_row);
      if (!own.is_empty()) any = any.is_empty() ? own : Bounds{min(any.begin, own.begin), max(any.end, own.end)};
    }
    if (any.is_empty()) return end();
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const ColumnTile tile(static_cast<int32_t>(blockIdx.x) * kConsumers + consumer, params.mla_heads);
      load_heads<false>(tile.first_row, tile.first_head);
    }
#pragma unroll 1
    for (int32_t key = any.begin / kTileKeys * kTileKeys; key < any.end; key += kTileKeys) load_keys(key);
    end();
  }

  // This CTA's keys, then the heads of those of its rows that see some of them.
  __device__ __forceinline__ void run_target(int32_t first_key, int32_t first_row) {
    RowGroups groups(params, {first_key, first_key + kBlockKeys}, first_row, first_row + params.chunk_rows);
    RowGroup group;
    if (!groups.next<false>(group)) return end();
    for (int consumer = 0; consumer < kConsumers; ++consumer) load_keys(first_key + consumer * kTileKeys);
    do {
#pragma unroll 1
      for (int32_t head = 0; head < params.mla_heads; head += kHeads) load_heads<true>(group.first_row, head);
    } while (groups.next<false>(group));
    end();
  }

 private:
  // kWithLse: whether log-sum-exps of these heads go with them.
  template <bool kWithLse>
  __device__ __forceinline__ void load_heads(int32_t row, int32_t head) {
    storage.free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.streamed[ring.stage] = {row, params.mla_heads - head};
      storage.full[ring.stage].arrive_and_expect(sizeof(storage.tiles[0]));
      for (int tile = 0; tile < TeacherConfig::kKeyTiles; ++tile) {
        tma_load_4d(storage.tiles[ring.stage][tile], heads_map, storage.full[ring.stage], tile * 64, head,
                    params.first_query + row, params.batch);
      }
    }
    // Behind the copies: these loads are waited for here.
    if constexpr (kWithLse) {
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) {
        const int column = i * 32 + lane;
        storage.lse[ring.stage][column] = lse_of(row + column / kHeads, head + column % kHeads);
      }
    }
    finish();
  }

  __device__ __forceinline__ void load_keys(int32_t key) {
    storage.free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.streamed[ring.stage] = {key, 0};
      storage.full[ring.stage].arrive_and_expect(sizeof(storage.tiles[0]));
      for (int tile = 0; tile < TeacherConfig::kKeyTiles; ++tile) {
        tma_load_4d(storage.tiles[ring.stage][tile], keys_map, storage.full[ring.stage], tile * 64, key, params.batch,
                    0);
      }
    }
    finish();
  }

  // Tells consumers that there is no more.
  __device__ __forceinline__ void end() {
    storage.free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.streamed[ring.stage] = {-1, 0};
      storage.full[ring.stage].arrive();
    }
    finish();
  }

  __device__ __forceinline__ void finish() {
    storage.full[ring.stage].arrive();
    ring.advance();
  }

  __device__ __forceinline__ Log2Lse lse_of(int32_t row, int32_t head) const {
    if (row >= params.queries || head >= params.mla_heads) return {positive_infinity(), 0.0f};
    if (params.mla_lse == nullptr) {
      const float2 computed = __ldg(params.lse + static_cast<int64_t>(row) * params.mla_heads + head);
      return {computed.x, computed.y};
    }
    return log2_lse(params.mla_lse[row * params.mla_lse_query + head * params.mla_lse_head], params.unit,
                    params.unit_rest);
  }
};

}  // namespace cupymla::indexer_loss_dense
