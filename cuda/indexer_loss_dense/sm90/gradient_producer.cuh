// The producer warp of stages `dq` and `dk`.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "gradient_storage.cuh"
#include "row_groups.cuh"
#include "rows.cuh"

namespace cupymla::indexer_loss_dense {

template <typename Storage>
struct GradientProducer {
  Storage& storage;
  const Parameters& params;
  const TensorMap& heads_map;
  const TensorMap& keys_map;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<Storage::kStages> ring;
  uint32_t landings = 0;

  // Heads of the CTA's two column tiles, then the keys that their rows see.
  __device__ __forceinline__ void run_dq() {
    Bounds any{0, 0};
    int32_t first_row[kConsumers];
#pragma unroll
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const ColumnTile tile = dq_tile(params, consumer);
      first_row[consumer] = tile.first_row;
      const Bounds own = visible_to_any<kRows>(params, tile.first_row);
      if (!own.is_empty()) any = any.is_empty() ? own : Bounds{min(any.begin, own.begin), max(any.end, own.end)};
      load_heads(storage.kept[consumer], storage.landed, tile.first_row, tile.first_head, true);
      land();
      zero_left_out(storage.kept[consumer], left_out(tile.first_row));
    }
    storage.kept_full.arrive();
    const uint64_t l2_policy = l2_policy_evict_first();
    uint32_t own_bits = 0;  // of 32 keys: sixteen tiles' are loaded at a time
#pragma unroll 1
    for (int32_t tile = any.begin / kTileKeys, from = tile; tile * kTileKeys < any.end; ++tile) {
      const int32_t key = tile * kTileKeys, word = (tile - from) % 16 * 2;
      if (word == 0) {
        const int32_t own = key / 32 + lane;
        own_bits = own * 32 < params.row_stride ? params.bad_keys[own] : 0;
      }
      const uint32_t low = __shfl_sync(0xffffffffu, own_bits, word);
      const uint32_t high = __shfl_sync(0xffffffffu, own_bits, word + 1);
      storage.free[ring.stage].wait(ring.free());
      Mbarrier& full = storage.full[ring.stage];
      const bool clean = (low | high) == 0;
      const uint32_t gradient_bytes = sizeof(storage.gradients[0]) / (params.splits_keys != 0 ? kConsumers : 1);
      if (!clean) {
        load_keys(storage.streamed[ring.stage], storage.landed, key, true);
        land();
        zero_bad_keys(storage.streamed[ring.stage], low, high);
      }
      if (lane == 0) {
        storage.first[ring.stage] = key;
        full.arrive_and_expect(gradient_bytes + (clean ? sizeof(Tile) : 0));
      }
      __syncwarp();
      if (clean) load_keys(storage.streamed[ring.stage], full, key, false);
      if (lane < (params.splits_keys != 0 ? 1 : kConsumers) * kRows) {
        const int consumer = lane / kRows, row = lane % kRows;
        const int64_t from_row = (consumer == 0 ? first_row[0] : first_row[1]) + row;
        bulk_load(storage.gradients[ring.stage][consumer][row], params.gradients + from_row * params.row_stride + key,
                  kTileKeys * sizeof(float), full, l2_policy);
      }
      finish();
    }
    end();
  }

  // The CTA's keys, then the heads of those rows of its slice that see some of them.
  __device__ __forceinline__ void run_dk(int32_t first_key, int32_t first_row) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int32_t key = first_key + consumer * kTileKeys;
      load_keys(storage.kept[consumer], storage.landed, key, true);
      land();
      zero_bad_keys(storage.kept[consumer], params.bad_keys[key / 32], params.bad_keys[key / 32 + 1]);
    }
    storage.kept_full.arrive();
    const float scale = operand_scale(kScaled ? *params.largest_term : 0.0f);
    const uint64_t l2_policy = l2_policy_evict_first();
    RowGroups groups(params, {first_key, first_key + kBlockKeys}, first_row, first_row + params.slice_rows);
    RowGroup group;
    bool there = groups.next<true>(group);
    Weights weights = load_weights(group, 0, there);
    for (int32_t head = 0; there;) {
      storage.free[ring.stage].wait(ring.free());
      Mbarrier& full = storage.full[ring.stage];
      constexpr uint32_t kGradientBytes = sizeof(storage.gradients[0]);
      const bool clean = group.left_out == 0;
      if (!clean) {
        load_heads(storage.streamed[ring.stage], storage.landed, group.first_row, head, true);
        land();
        zero_left_out(storage.streamed[ring.stage], group.left_out);
      }
      if (lane == 0) {
        storage.first[ring.stage] = group.first_row;
        storage.spoilt[ring.stage] = group.spoilt;
        full.arrive_and_expect(kGradientBytes + (clean ? sizeof(Tile) : 0));
      }
      __syncwarp();
      if (clean) load_heads(storage.streamed[ring.stage], full, group.first_row, head, false);
      if (lane < kRows) {
        bulk_load(storage.gradients[ring.stage][lane],
                  params.gradients + (group.first_row + lane) * params.row_stride + first_key,
                  kBlockKeys * sizeof(float), full, l2_policy);
      }
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) storage.weights[ring.stage][i * 32 + lane] = weights.of[i] * scale;
      finish();
      // Those of the next tile are under way while its stage is waited for.
      head += kHeads;
      if (head >= params.heads) {
        head = 0;
        there = groups.next<true>(group);
      }
      weights = load_weights(group, head, there);
    }
    end();
  }

  // The column tile of a consumer of stage `dq`; where there is none of that number, the last one once more.
  static __device__ __forceinline__ ColumnTile dq_tile(const Parameters& params, int consumer) {
    const int32_t first = static_cast<int32_t>(blockIdx.x);
    const int32_t number = params.splits_keys != 0 ? first : first * kConsumers + consumer;
    return ColumnTile(min(number, column_tiles(params.queries, params.heads) - 1), params.heads);
  }

 private:
  // A lane's weights of a column tile; 0 for heads that only fill up and rows that take no part.
  struct Weights {
    float of[kColumns / 32];
  };

  __device__ __forceinline__ Weights load_weights(const RowGroup& group, int32_t first_head, bool there) const {
    Weights weights;
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int column = i * 32 + lane, row = column / kHeads, head = first_head + column % kHeads;
      const bool counts = there && head < params.heads && (group.left_out >> row & 1u) == 0;
      weights.of[i] = counts ? weight_of(params, group.first_row + row, head) : 0.0f;
    }
    return weights;
  }

  // Rows of the group that take no part in products, a bit each.
  __device__ __forceinline__ uint32_t left_out(int32_t row) const {
    return __ballot_sync(0xffffffffu, lane < kRows && params.states[row + lane % kRows] != kSound);
  }

  __device__ __forceinline__ void load_heads(Tile& tile, Mbarrier& full, int32_t row, int32_t head, bool expects) {
    if (lane != 0) return;
    if (expects) full.arrive_and_expect(sizeof(Tile));
    for (int column = 0; column < kDTiles; ++column) {
      tma_load_4d(tile[column], heads_map, full, column * 64, head, params.first_query + row, params.batch);
    }
  }

  __device__ __forceinline__ void load_keys(Tile& tile, Mbarrier& full, int32_t key, bool expects) {
    if (lane != 0) return;
    if (expects) full.arrive_and_expect(sizeof(Tile));
    for (int column = 0; column < kDTiles; ++column) {
      tma_load_4d(tile[column], keys_map, full, column * 64, key, params.batch, 0);
    }
  }

  __device__ __forceinline__ void land() {
    storage.landed.wait(landings++ & 1u);
    __syncwarp();  // nobody still waits when the next phase begins
  }

  __device__ __forceinline__ void zero_left_out(Tile& tile, uint32_t rows) const {
    for (; rows != 0; rows &= rows - 1) zero_rows(tile, (__ffs(static_cast<int>(rows)) - 1) * kHeads, kHeads);
    fence_async_shared();
  }

  __device__ __forceinline__ void zero_bad_keys(Tile& tile, uint32_t low, uint32_t high) const {
    for (; low != 0; low &= low - 1) zero_rows(tile, __ffs(static_cast<int>(low)) - 1, 1);
    for (; high != 0; high &= high - 1) zero_rows(tile, 32 + __ffs(static_cast<int>(high)) - 1, 1);
    fence_async_shared();
  }

  __device__ __forceinline__ void zero_rows(Tile& tile, int first, int count) const {
    for (int chunk = lane; chunk < count * 8; chunk += 32) {
      for (int column = 0; column < kDTiles; ++column) {
        reinterpret_cast<uint4*>(tile[column] + first * kSwizzleRowBytes)[chunk] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Tells consumers that there is no more.
  __device__ __forceinline__ void end() {
    storage.free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.first[ring.stage] = -1;
      storage.full[ring.stage].arrive();
    }
    finish();
  }

  __device__ __forceinline__ void finish() {
    storage.full[ring.stage].arrive();
    ring.advance();
  }
};

}  // namespace cupymla::indexer_loss_dense
