// The thread that issues all products of a CTA by itself: S = Q K^T of a block, and amid them O += P V of the block
// before it.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "lengths.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Storage, bool kFp16>
struct FewHeadsProducts {
  using Config = typename Storage::Config;
  static constexpr uint32_t kStepBytes = 32;              // 16 elements along K of a row
  static constexpr uint32_t kTransposedStepBytes = 2048;  // 16 rows
  static constexpr uint32_t kStepColumns = 8;             // 16 elements along K in Tensor Memory
  static constexpr int kSteps = 4;                        // of 16, in a tile
  static constexpr uint32_t kScores = sm100::instruction_f16(Config::kHeads, Config::kSlots, kFp16);
  static constexpr uint32_t kValues =
      sm100::instruction_f16(Config::kHeads, Config::kLaneHalves * Config::kChunkColumns, kFp16, false, true);

  Storage& storage;
  const Parameters& params;
  const Place<Config> place;
  const uint32_t tmem;
  Lengths<Storage, true> lengths;
  uint32_t keys_stage = 0, values_stage = 0;  // of the ring, that come next
  Phases keys_phases;                         // stages of Q have none
  Ring<2> ropes;
  uint32_t q_parity = 0, p_parity = 0;
  uint32_t s_parity = 1, o_parity = 1;  // of s_free and o_free

  __device__ __forceinline__ FewHeadsProducts(Storage& storage, const Parameters& params)
      : storage(storage), params(params), tmem(storage.tmem), lengths{storage, params} {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place, lengths.next());
      if (work.blocks == 0) return;
      keys_stage = (keys_stage + Config::kQueryStages) % Config::kStages;
      values_stage = keys_stage;
      storage.q_full.wait(q_parity);
      for (int32_t block = 0; block < work.blocks; ++block) {
        first_scores(block == 0);
        if (block > 0) values(block == 1);
        other_scores();
      }
      sm100::commit(storage.q_free);
      q_parity ^= 1u;
      values(work.blocks == 1);
      sm100::commit(storage.o_full);
    });
  }

  static __device__ __forceinline__ uint32_t next(uint32_t stage) {
    return stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // The stage that comes next is full of keys from here on; gives where they are.
  __device__ __forceinline__ uint64_t take_keys() {
    const uint32_t stage = keys_stage;
    storage.keys[stage].wait(keys_phases.full(stage));
    keys_phases.advance(stage);
    keys_stage = next(stage);
    return sm100::descriptor_128b(smem_address(storage.stages[stage]));
  }

  // One tile of the scores, with Q's tile in shared memory or in Tensor Memory.
  __device__ __forceinline__ void multiply_tile(int tile, uint64_t keys) {
    const uint32_t scores = tmem + Config::kScoresColumn;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = keys + (step * kStepBytes >> 4);
      if (tile < Config::kFirstTmemTile) {
        const uint64_t a = sm100::descriptor_128b(smem_address(storage.q[tile - Config::kFirstSharedTile]));
        sm100::mma_ws_f16(scores, a + (step * kStepBytes >> 4), b, kScores, tile + step != 0);
      } else {
        const uint32_t first = tmem + Config::kQueryColumn + (tile - Config::kFirstTmemTile) * Config::kQueryTileColumns;
        sm100::mma_ws_f16_from_tmem(scores, first + step * kStepColumns, b, kScores, tile + step != 0);
      }
    }
  }

  // The scores' share of a block's first stage. Q's tiles in shared memory are among it, and those in Tensor Memory
  // first wanted.
  __device__ __forceinline__ void first_scores(bool first_block) {
    storage.s_free.wait(s_parity);
    s_parity ^= 1u;
    sm100::fence_after_sync();
    const uint64_t keys = take_keys();
#pragma unroll
    for (int tile = 0; tile < Config::kStageTiles; ++tile) {
      if (tile == Config::kFirstTmemTile && first_block) {
        storage.q_ready.wait(q_parity);
        sm100::fence_after_sync();
      }
      multiply_tile(tile, keys + tile * (sm100::kTileBytes >> 4));
    }
  }

  __device__ __forceinline__ void other_scores() {
#pragma unroll
    for (int part = 1; part < Config::kBlockStages; ++part) {
      const uint64_t keys = take_keys();
#pragma unroll
      for (int tile = 0; tile < Config::kStageTiles; ++tile) {
        multiply_tile(part * Config::kStageTiles + tile, keys + tile * (sm100::kTileBytes >> 4));
      }
    }
    if constexpr (Config::kHasRope) {
      storage.rope_full[ropes.stage].wait(ropes.full);
      multiply_tile(Config::kValueTiles, sm100::descriptor_128b(smem_address(storage.ropes[ropes.stage])));
      sm100::commit(storage.rope_free[ropes.stage]);
      ropes.advance();
    }
    sm100::commit(storage.s_ready);
  }

  // Each stage, whose keys have been multiplied, is the values of a chunk of the output.
  __device__ __forceinline__ void values(bool first_block) {
    storage.p_ready.wait(p_parity);
    p_parity ^= 1u;
    if (first_block) {
      storage.o_free.wait(o_parity);
      o_parity ^= 1u;
    }
    sm100::fence_after_sync();
    const uint64_t a = sm100::descriptor_128b(smem_address(storage.p[0]));
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      const uint32_t output = tmem + Config::kOutputColumn + chunk * Config::kChunkColumns;
      const uint64_t b = sm100::descriptor_128b_transposed(smem_address(storage.stages[values_stage]),
                                                           sm100::kTileBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm100::mma_ws_f16(output, a + (step * kStepBytes >> 4), b + (step * kTransposedStepBytes >> 4), kValues,
                          !first_block || step != 0);
      }
      sm100::commit(storage.free[values_stage]);
      values_stage = next(values_stage);
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
