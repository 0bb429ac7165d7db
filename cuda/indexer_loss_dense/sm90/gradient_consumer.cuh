// What consumers of stages `dq` and `dk` have in common: both products, and letting go of tiles.
#pragma once

#include "../../common/matrix.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "gradient_producer.cuh"
#include "gradient_storage.cuh"

namespace cupymla::indexer_loss_dense {

// A thread's rows of a product are r and r + 8 of its warp's sixteen, r = lane / 4; of each eight columns it has two.
template <typename Storage>
struct GradientConsumer {
  using Terms = uint32_t[4][4];  // operands of the second product, sixteen columns of the first one a step

  Storage& storage;
  const Parameters& params;
  const int warpgroup_idx;
  const int warp = static_cast<int>(threadIdx.x / 32 % 4), lane = static_cast<int>(threadIdx.x % 32);
  Ring<Storage::kStages> ring;
  int before = -1;  // stage of the tile whose second product may still be under way

  // With 64 channels rows are kept in shared memory: ptxas 13.0 gives registers of theirs to the terms, and the second
  // tile is multiplied by the first one's terms (seen in the machine code of every variant, 2026-11-28).
  static constexpr bool kInRegisters = kD > 64;
  uint32_t kept[kInRegisters ? kD / 16 : 1][4];
  float sums[kD / 2];

  __device__ __forceinline__ GradientConsumer(Storage& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage), params(params), warpgroup_idx(warpgroup_idx) {}

  // Of this thread's row in a half, among the 64.
  __device__ __forceinline__ int own_row(int half) const { return warp * 16 + half * 8 + lane / 4; }

  // Takes in the rows that this consumer keeps.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) sums[i] = 0.0f;
    storage.kept_full.wait(0);
    if constexpr (kInRegisters) {
      const uint32_t base = smem_address(storage.kept[warpgroup_idx][0]);
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        load_matrix_x4(kept[step],
                       base + step / 4 * kTileBytes + swizzle_128(warp * 16 + lane % 16, step % 4 * 2 + lane / 16));
      }
    }
  }

  // Lets go of the next tile, which is the other consumer's; does nothing where there is none.
  __device__ __forceinline__ void skip() {
    storage.full[ring.stage].wait(ring.full);
    if (storage.first[ring.stage] < 0) return;
    storage.free[ring.stage].arrive();
    ring.advance();
  }

  // Waits for the next tile and has its first product; false where there is none. All products before are complete.
  __device__ __forceinline__ bool next(float (&products)[kScores], int& stage) {
    stage = static_cast<int>(ring.stage);
    storage.full[stage].wait(ring.full);
    const bool there = storage.first[stage] >= 0;
    if (there) issue_first(products, stage);
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(products);
    sm90::warpgroup_fence_operand(sums);
    if (!there) return false;
    if (before >= 0) storage.free[before].arrive();
    before = stage;
    ring.advance();
    return true;
  }

  // Adds the second product of a tile to the sums.
  __device__ __forceinline__ void issue_second(Terms& terms, int stage) {
    const uint64_t rows = sm90::mn_major_descriptor(indexer::uniform_address(storage.streamed[stage][0]), kTileBytes);
    // Operands are in their registers in front of the first product.
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) make_opaque(terms[step][i]);
    }
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      sm90::mma<typename indexer::Products<Element, kD>::FromRegisters>(
          sums, terms[step], sm90::descriptor_advance(rows, step * 2 * kSwizzleAtomBytes));
    }
    sm90::wgmma_commit();
  }

  // A pair of products that are positive, or without a ReLU any, as a mask of operands.
  static __device__ __forceinline__ uint32_t active(float first, float second, bool always) {
    return (always || first > 0.0f ? 0x0000ffffu : 0u) | (always || second > 0.0f ? 0xffff0000u : 0u);
  }

 private:
  __device__ __forceinline__ void issue_first(float (&products)[kScores], int stage) {
    const uint64_t rows = sm90::k_major_descriptor(indexer::uniform_address(storage.streamed[stage][0]));
    sm90::warpgroup_discard_operand(products);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const uint64_t columns = sm90::descriptor_advance(rows, step / 4 * kTileBytes + step % 4 * 32);
      if constexpr (kInRegisters) {
        sm90::mma<typename sm90::Atoms<Element>::ScoresFromRegisters>(products, kept[step], columns, step == 0);
      } else {
        const uint64_t own = sm90::k_major_descriptor(indexer::uniform_address(storage.kept[warpgroup_idx][0]));
        sm90::mma<typename sm90::Atoms<Element>::Scores>(products, sm90::descriptor_advance(own, step * 32), columns,
                                                         step == 0);
      }
    }
    sm90::wgmma_commit();
  }
};

}  // namespace cupymla::indexer_loss_dense
