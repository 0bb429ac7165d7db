// What consumers of stages `dq` and `dk` have in common: the first product, and letting go of tiles.
#pragma once

#include "../../common/matrix.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "gradient_producer.cuh"
#include "gradient_storage.cuh"

namespace cupymla::indexer_loss_dense {

// A thread's rows of the first product are keys r and r + 8 of its warp's sixteen, r = lane / 4; of each eight columns
// it has two.
template <typename Storage>
struct GradientConsumer {
  Storage& storage;
  const Parameters& params;
  const int warpgroup_idx;
  const int warp = static_cast<int>(threadIdx.x / 32 % 4), lane = static_cast<int>(threadIdx.x % 32);
  Ring<Storage::kStages> ring;
  int before = -1;  // stage of the tile whose second product may still be under way

  __device__ __forceinline__ GradientConsumer(Storage& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage), params(params), warpgroup_idx(warpgroup_idx) {}

  // Of this thread's row in a half, among the 64 keys of a tile.
  __device__ __forceinline__ int own_key(int half) const { return warp * 16 + half * 8 + lane / 4; }

  // Waits for the next tile and has its first product; false where there is none. All products before are complete.
  __device__ __forceinline__ bool next(float (&products)[kScores], int& stage) {
    stage = static_cast<int>(ring.stage);
    storage.full[stage].wait(ring.full);
    if (storage.first[stage] < 0) {
      sm90::wgmma_wait<0>();
      return false;
    }
    Tile& keys = kStage == kDq ? storage.streamed[stage] : storage.kept[warpgroup_idx];
    Tile& heads = kStage == kDq ? storage.kept[warpgroup_idx] : storage.streamed[stage];
    indexer::multiply_keys<Element>(products, keys, heads);
    if (before >= 0) {
      __syncwarp();
      if (lane == 0) storage.free[before].arrive();
    }
    before = stage;
    ring.advance();
    return true;
  }

  // A pair of products that are positive, or without a ReLU any, as a mask of operands.
  static __device__ __forceinline__ uint32_t active(float first, float second, bool always) {
    return (always || first > 0.0f ? 0x0000ffffu : 0u) | (always || second > 0.0f ? 0xffff0000u : 0u);
  }
};

}  // namespace cupymla::indexer_loss_dense
