// The thread that issues all products of the pair: S = Q K^T of one block, then O += P V of the block before it.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "lengths.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Storage, bool kFp16>
struct Products {
  using Config = typename Storage::Config;
  static constexpr uint32_t kStepBytes = 32;              // 16 elements along K of a row
  static constexpr uint32_t kTransposedStepBytes = 2048;  // 16 rows
  static constexpr uint32_t kStepColumns = 8;             // 16 elements along K in Tensor Memory
  static constexpr int kSteps = 4;                        // of 16, in a tile
  static constexpr uint32_t kScores = sm100::instruction_f16(Config::kItemHeads, Config::kSlots, kFp16);
  static constexpr uint32_t kValues =
      sm100::instruction_f16(Config::kItemHeads, Config::kLaneHalves * Config::kChunkColumns, kFp16, false, true);

  Storage& storage;
  const Parameters& params;
  const Place<Config> place;
  const uint32_t tmem;
  Lengths<Storage, true> lengths;
  const uint16_t pair = static_cast<uint16_t>(3u << place.leader);  // both CTAs, for commits
  uint32_t keys_stage = 0, values_stage = 0;  // of the ring, that come next
  Phases keys_phases, values_phases;          // stages of Q have none
  Ring<2> ropes;
  uint32_t q_parity = 0, p_parity = 0;
  uint32_t s_parity = 1, o_parity = 1;  // of s_free and o_free

  __device__ __forceinline__ Products(Storage& storage, const Parameters& params)
      : storage(storage), params(params), tmem(storage.tmem), lengths{storage, params} {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place, lengths.next());
      if (work.blocks == 0) return;
      keys_stage = (keys_stage + Config::kQueryStages) % Config::kStages;
      values_stage = keys_stage;
      storage.q_ready.wait(q_parity);
      storage.q_full.wait(q_parity);
      q_parity ^= 1u;
      for (int32_t block = 0; block < work.blocks; ++block) {
        scores();
        if (block + 1 == work.blocks) sm100::commit_to_pair(storage.q_free, pair);
        if (block > 0) values(block == 1);
      }
      values(work.blocks == 1);
      sm100::commit_to_pair(storage.o_full, pair);
    });
  }

  static __device__ __forceinline__ uint32_t next(uint32_t stage) {
    return stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // One tile of the scores, with Q's tile in Tensor Memory or in shared memory.
  __device__ __forceinline__ void multiply_tile(int tile, uint64_t keys) {
    const uint32_t scores = tmem + Config::kScoresColumn;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = keys + (step * kStepBytes >> 4);
      if (tile < Config::kTmemTiles) {
        const uint32_t a = tmem + Config::kQueryColumn + tile * Config::kQueryTileColumns + step * kStepColumns;
        sm100::mma_f16_from_tmem<2>(scores, a, b, kScores, tile + step != 0);
      } else {
        const uint64_t a = sm100::descriptor_128b(smem_address(storage.q[tile - Config::kTmemTiles]));
        sm100::mma_f16<2>(scores, a + (step * kStepBytes >> 4), b, kScores, true);
      }
    }
  }

  __device__ __forceinline__ void scores() {
    storage.s_free.wait(s_parity);
    s_parity ^= 1u;
    sm100::fence_after_sync();
#pragma unroll
    for (int part = 0; part < Config::kBlockStages; ++part) {
      storage.keys[keys_stage].wait(keys_phases.full(keys_stage));
      keys_phases.advance(keys_stage);
      const uint64_t keys = sm100::descriptor_128b(smem_address(storage.stages[keys_stage]));
#pragma unroll
      for (int tile = 0; tile < Config::kStageTiles; ++tile) {
        multiply_tile(part * Config::kStageTiles + tile, keys + tile * (sm100::kTileBytes >> 4));
      }
      sm100::commit_to_pair(storage.keys_read[keys_stage], pair);
      keys_stage = next(keys_stage);
    }
    if constexpr (Config::kHasRope) {
      storage.rope_full[ropes.stage].wait(ropes.full);
      multiply_tile(Config::kValueTiles, sm100::descriptor_128b(smem_address(storage.ropes[ropes.stage])));
      sm100::commit_to_pair(storage.rope_free[ropes.stage], pair);
      ropes.advance();
    }
    sm100::commit_to_pair(storage.s_ready, pair);
  }

  __device__ __forceinline__ void values(bool first_block) {
    storage.p_ready.wait(p_parity);
    p_parity ^= 1u;
    if (first_block) {
      storage.o_free.wait(o_parity);
      o_parity ^= 1u;
    }
    sm100::fence_after_sync();
    // In the order of the stages, which is that in which they come and are needed again.
#pragma unroll
    for (int part = 0; part < Config::kBlockStages; ++part) {
      const int half = part / Config::kChunks, chunk = part % Config::kChunks;
      const uint32_t output = tmem + Config::kOutputColumn + chunk * Config::kChunkColumns;
      storage.values[values_stage].wait(values_phases.full(values_stage));
      values_phases.advance(values_stage);
      const uint64_t a = sm100::descriptor_128b(smem_address(storage.p[half]));
      const uint32_t tiles = smem_address(storage.stages[values_stage]);
      const uint64_t b = sm100::descriptor_128b_transposed(tiles, sm100::kTileBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm100::mma_f16<2>(output, a + (step * kStepBytes >> 4), b + (step * kTransposedStepBytes >> 4), kValues,
                          !first_block || half + step != 0);
      }
      sm100::commit_to_pair(storage.free[values_stage], pair);
      values_stage = next(values_stage);
    }
    sm100::commit_to_pair(storage.pv_done, pair);
  }
};

}  // namespace cupymla::sparse_mla_fwd
