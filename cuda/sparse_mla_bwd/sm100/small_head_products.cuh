// The MMA thread of the small-head variant: all five products of a block, over this CTA's channels. Scores of a block
// are multiplied in the midst of the gradients of the block before.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "small_head_storage.cuh"
#include "pair_operands.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, bool kFp16>
struct SmallHeadProducts : PairOperands<SmallHeadStorage<Config>> {
  using Base = PairOperands<SmallHeadStorage<Config>>;
  using Base::kStep, Base::kStepRows, Base::kHeadTile, Base::kKeyTile;
  using Base::storage, Base::has_rope, Base::tmem, Base::q, Base::dout, Base::k, Base::p, Base::ds;
  using Base::q_across, Base::dout_across, Base::k_across, Base::ds_across;

  uint32_t parity = 0;  // of the block
  Ring<Config::kPlaces> ring;

  __device__ __forceinline__ void run(int32_t blocks) {
    if (blocks == 0) return;
    const int parts = Config::kValueParts + (has_rope ? Config::kRopeParts : 0);
    storage.heads_full.wait(0);
    multiply_scores(0);
    for (int32_t block = 0; block < blocks; ++block) {
      storage.tiles_full.wait(parity);
      fence_async_shared();  // the other CTA's share of P and dS has come by st.async
      sm100::fence_after_sync();
      multiply_query_gradient(block > 0);
      sm100::commit(storage.k_free);
      parity ^= 1u;
      for (int part = 0; part < parts; ++part) {
        if (part == Config::kPlaces && block + 1 < blocks) multiply_scores(parity);
        multiply_part(part);
      }
      sm100::commit_to_pair<1>(storage.tiles_free);
    }
  }

  // S^T = K Q^T, then dP^T = V dO^T: entries x heads.
  __device__ __forceinline__ void multiply_scores(uint32_t k_parity) const {
    storage.k_full.wait(k_parity);
    multiply_scores(q, Config::kScores, Config::kOwnTiles + (has_rope ? 1 : 0));
    sm100::commit(storage.scores_full[0]);
    multiply_scores(dout, Config::kValueScores, Config::kOwnTiles);
    sm100::commit(storage.scores_full[1]);
  }

  __device__ __forceinline__ void multiply_scores(uint64_t heads, uint32_t column, int tiles) const {
    constexpr uint32_t kInstruction = sm100::instruction_f16(Config::kTileKeys, Config::kHeads, kFp16);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Config::kTileColumns / 16; ++step) {
        sm100::mma_f16(tmem + column, k + tile * kKeyTile + step * kStep, heads + tile * kHeadTile + step * kStep,
                       kInstruction, tile + step != 0);
      }
    }
  }

  // dQ^T += K^T dS: channels x heads, two tiles of channels at a time.
  __device__ __forceinline__ void multiply_query_gradient(bool accumulate) const {
    constexpr uint32_t kWide = sm100::instruction_f16(2 * Config::kTileColumns, Config::kHeads, kFp16, true, true);
    constexpr uint32_t kNarrow = sm100::instruction_f16(Config::kTileColumns, Config::kHeads, kFp16, true, true);
    for (int half = 0; half < Config::kOwnTiles / 2; ++half) {
      multiply_query_gradient(kWide, Config::kQueryGradient + half * Config::kHeads, 2 * half, accumulate);
    }
    if (has_rope) multiply_query_gradient(kNarrow, Config::kQueryGradientRope, Config::kRopeTile, accumulate);
  }

  __device__ __forceinline__ void multiply_query_gradient(uint32_t instruction, uint32_t column, int tile,
                                                          bool accumulate) const {
#pragma unroll
    for (int step = 0; step < Config::kTileKeys / 16; ++step) {
      sm100::mma_f16(tmem + column, k_across + tile * kKeyTile + step * kStepRows, ds_across + step * kStepRows,
                     instruction, accumulate || step != 0);
    }
  }

  // A part of dK = Q^T dS, to which dV = dO^T P is added: channels x entries.
  __device__ __forceinline__ void multiply_part(int part) {
    constexpr int kSteps = Config::kHeads / 16;
    constexpr uint32_t kHalf = Config::kPartKeys * kSwizzleRowBytes / 16;
    constexpr uint32_t kWide = sm100::instruction_f16(2 * Config::kTileColumns, Config::kPartKeys, kFp16, true);
    constexpr uint32_t kNarrow = sm100::instruction_f16(Config::kTileColumns, Config::kPartKeys, kFp16, true);
    const uint32_t tile = part / Config::kHalves * 2, entries = part % Config::kHalves * kHalf;
    const bool is_rope = part >= Config::kValueParts;
    const uint32_t d = tmem + Config::kKeyGradient + ring.stage * Config::kPartKeys;
    storage.part_free[ring.stage].wait(ring.free());
    sm100::fence_after_sync();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm100::mma_f16(d, q_across + tile * kHeadTile + step * kStepRows, ds + entries + step * kStep,
                     is_rope ? kNarrow : kWide, step != 0);
    }
    if (!is_rope) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm100::mma_f16(d, dout_across + tile * kHeadTile + step * kStepRows, p + entries + step * kStep, kWide, true);
      }
    }
    sm100::commit(storage.part_full[ring.stage]);
    ring.advance();
  }
};

}  // namespace cupymla::sparse_mla_bwd
