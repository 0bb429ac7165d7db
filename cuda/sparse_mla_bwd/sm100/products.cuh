// The MMA thread: all five products of a block, over this CTA's channels.
#pragma once

#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sparse_query.cuh"
#include "pair_operands.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, bool kFp16>
struct Products : PairOperands<Storage<Config>> {
  using Base = PairOperands<Storage<Config>>;
  using Base::kStep, Base::kStepRows, Base::kHeadTile, Base::kKeyTile;
  using Base::storage, Base::has_rope, Base::tmem, Base::q, Base::dout, Base::k, Base::p_across, Base::ds;
  using Base::q_across, Base::dout_across, Base::k_across, Base::ds_across;

  static constexpr int kSteps = Config::kHeads / 16;  // of what is summed over heads

  uint32_t parity = 0, head_block_parity = 0;

  __device__ __forceinline__ void run(const SparseQuery<Config::kTileKeys>& query) {
    if (query.blocks == 0) return;
    storage.heads_full.wait(head_block_parity);
    head_block_parity ^= 1u;
    for (int32_t block = 0; block < query.blocks; ++block) {
      // The block before has had its parts 0 and 1 of dKV where S and dP come now.
      storage.k_full.wait(parity);
      wait_for_place(0);
      multiply_scores<0>(q, Config::kScores, Config::kOwnTiles + (has_rope ? 1 : 0));
      wait_for_place(1);
      multiply_scores<1>(dout, Config::kValueScores, Config::kOwnTiles);
      storage.tiles_full.wait(parity);
      fence_async_shared();  // the other CTA's share of P and dS has come by st.async
      sm100::fence_after_sync();
      multiply_query_gradient(block > 0);
      sm100::commit(storage.k_free);
      // S and dP have been read: P and dS are out. The parts in whose place the next block's scores come go first, so
      // that reducers have as long as possible to take them.
      multiply_part(0);
      multiply_part(1);
      if (has_rope) {
        wait_for_place(Config::kRopePart);
        multiply_rope();
      }
      sm100::commit_to_pair<1>(storage.tiles_free);
      parity ^= 1u;
    }
  }

  // Until the reducers have taken the part of dKV that was there.
  __device__ __forceinline__ void wait_for_place(int place) const {
    storage.part_free[place].wait(parity ^ 1u);
    sm100::fence_after_sync();
  }

  // S = Q K^T or dP = dO V^T: heads x entries.
  template <int kWhich>
  __device__ __forceinline__ void multiply_scores(uint64_t heads, uint32_t column, int tiles) const {
    constexpr uint32_t kInstruction = sm100::instruction_f16(Config::kHeads, Config::kTileKeys, kFp16);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < Config::kTileColumns / 16; ++step) {
        sm100::mma_f16(tmem + column, heads + tile * kHeadTile + step * kStep, k + tile * kKeyTile + step * kStep,
                       kInstruction, tile + step != 0);
      }
    }
    sm100::commit(storage.scores_full[kWhich]);
  }

  // dQ += dS K: heads x channels.
  __device__ __forceinline__ void multiply_query_gradient(bool accumulate) const {
    constexpr uint32_t kWide = sm100::instruction_f16(Config::kHeads, Config::kOwnTiles * Config::kTileColumns, kFp16,
                                                      false, true);
    constexpr uint32_t kNarrow = sm100::instruction_f16(Config::kHeads, Config::kTileColumns, kFp16, false, true);
#pragma unroll
    for (int step = 0; step < Config::kTileKeys / 16; ++step) {
      sm100::mma_f16(tmem + Config::kQueryGradient, ds + step * kStep, k_across + step * kStepRows, kWide,
                     accumulate || step != 0);
    }
    if (!has_rope) return;
#pragma unroll
    for (int step = 0; step < Config::kTileKeys / 16; ++step) {
      sm100::mma_f16(tmem + Config::kQueryGradientRope, ds + step * kStep,
                     k_across + Config::kRopeTile * kKeyTile + step * kStepRows, kNarrow, accumulate || step != 0);
    }
  }

  // Two tiles of channels of dK = Q^T dS, to which dV = dO^T P is added: channels x entries.
  __device__ __forceinline__ void multiply_part(int part) const {
    constexpr uint32_t kWide = sm100::instruction_f16(2 * Config::kTileColumns, Config::kTileKeys, kFp16, true, true);
    const uint32_t d = tmem + Config::kKeyGradient + part * Config::kPartKeys;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm100::mma_f16(d, q_across + 2 * part * kHeadTile + step * kStepRows, ds_across + step * kStepRows, kWide,
                     step != 0);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm100::mma_f16(d, dout_across + 2 * part * kHeadTile + step * kStepRows, p_across + step * kStepRows, kWide,
                     true);
    }
    sm100::commit(storage.part_full[part]);
  }

  // The RoPE's tile of dK.
  __device__ __forceinline__ void multiply_rope() const {
    constexpr uint32_t kNarrow = sm100::instruction_f16(Config::kTileColumns, Config::kTileKeys, kFp16, true, true);
    const uint32_t d = tmem + Config::kKeyGradient + Config::kRopePart * Config::kPartKeys;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm100::mma_f16(d, q_across + Config::kRopeTile * kHeadTile + step * kStepRows, ds_across + step * kStepRows,
                     kNarrow, step != 0);
    }
    sm100::commit(storage.part_full[Config::kRopePart]);
  }
};

}  // namespace cupymla::sparse_mla_bwd
