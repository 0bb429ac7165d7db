// What the threads that issue products have in common, for a pair or for a CTA by itself: operands, instructions, and
// where in the ring they are.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "lengths.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename StorageArg, bool kFp16>
struct ProductSteps {
  using Storage = StorageArg;
  using Config = typename Storage::Config;
  static constexpr uint32_t kStepBytes = 32;              // 16 elements along K of a row
  static constexpr uint32_t kTransposedStepBytes = 2048;  // 16 rows
  static constexpr uint32_t kStepColumns = 8;             // 16 elements along K in Tensor Memory
  static constexpr int kSteps = 4;                        // of 16, in a tile
  static constexpr uint32_t kScores = sm100::instruction_f16(Config::kItemHeads, Config::kTileKeys, kFp16);
  static constexpr uint32_t kValues =
      sm100::instruction_f16(Config::kItemHeads, Config::kLaneHalves * Config::kChunkColumns, kFp16, false, true);

  Storage& storage;
  const Parameters& params;
  const CtaPosition<Config> cta;
  const uint32_t tmem;
  Lengths<Storage, true> lengths;
  const uint16_t pair = static_cast<uint16_t>(3u << cta.leader);    // both CTAs, for commits
  uint32_t keys_stage = 0, values_stage = 0;  // of the ring, that come next
  Phases keys_phases;                         // stages of Q have none
  Ring<2> ropes;
  uint32_t q_parity = 0, p_parity = 0;
  uint32_t s_parity = 1, o_parity = 1;  // of s_free and o_free

  __device__ __forceinline__ ProductSteps(Storage& storage, const Parameters& params)
      : storage(storage), params(params), tmem(storage.tmem), lengths{storage, params} {}

  static __device__ __forceinline__ uint32_t next(uint32_t stage) {
    return stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // Arrives at a barrier of all CTAs of the item once all products so far are done.
  __device__ __forceinline__ void commit(Mbarrier& barrier) const {
    if constexpr (Config::kCtas == 1) {
      sm100::commit(barrier);
    } else {
      sm100::commit_to_pair(barrier, pair);
    }
  }

  static __device__ __forceinline__ void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                                                  bool accumulate) {
    if constexpr (Config::kCtas == 1) {
      sm100::mma_ws_f16(d, a, b, instruction, accumulate);
    } else {
      sm100::mma_f16<2>(d, a, b, instruction, accumulate);
    }
  }

  static __device__ __forceinline__ void multiply_from_tmem(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                                                            bool accumulate) {
    if constexpr (Config::kCtas == 1) {
      sm100::mma_ws_f16_from_tmem(d, a, b, instruction, accumulate);
    } else {
      sm100::mma_f16_from_tmem<2>(d, a, b, instruction, accumulate);
    }
  }

  // A new query's blocks come behind its Q.
  __device__ __forceinline__ void pass_query_stages() {
    keys_stage = (keys_stage + Config::kQueryStages) % Config::kStages;
    values_stage = keys_stage;
  }

  // Waits until the scores of the block before have been read.
  __device__ __forceinline__ void begin_scores() {
    storage.s_free.wait(s_parity);
    s_parity ^= 1u;
    sm100::fence_after_sync();
  }

  // Waits for P of a block, and for a query's first one until O of the query before has been read.
  __device__ __forceinline__ void begin_values(bool first_block) {
    storage.p_ready.wait(p_parity);
    p_parity ^= 1u;
    if (first_block) {
      storage.o_free.wait(o_parity);
      o_parity ^= 1u;
    }
    sm100::fence_after_sync();
  }

  // Waits until the next stage of keys is full; gives which one that is.
  __device__ __forceinline__ uint32_t take_keys() {
    const uint32_t stage = keys_stage;
    storage.keys[stage].wait(keys_phases.full(stage));
    keys_phases.advance(stage);
    keys_stage = next(stage);
    return stage;
  }

  __device__ __forceinline__ uint64_t keys_of(uint32_t stage) const {
    return sm100::descriptor_128b(smem_address(storage.stages[stage]));
  }

  // One tile of the scores, with Q's tile in Tensor Memory or in shared memory.
  __device__ __forceinline__ void multiply_tile(int tile, uint64_t keys) {
    const uint32_t scores = tmem + Config::kScoresColumn;
    const int own = tile - Config::kFirstTmemTile;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = keys + (step * kStepBytes >> 4);
      if (own >= 0 && own < Config::kTmemTiles) {
        const uint32_t a = tmem + Config::kQueryColumn + own * Config::kQueryTileColumns + step * kStepColumns;
        multiply_from_tmem(scores, a, b, kScores, tile + step != 0);
      } else {
        const uint64_t a = sm100::descriptor_128b(smem_address(storage.q[tile - Config::kFirstSharedTile]));
        multiply(scores, a + (step * kStepBytes >> 4), b, kScores, tile + step != 0);
      }
    }
  }

  __device__ __forceinline__ void multiply_stage(int part, uint64_t keys) {
#pragma unroll
    for (int tile = 0; tile < Config::kStageTiles; ++tile) {
      multiply_tile(part * Config::kStageTiles + tile, keys + tile * (sm100::kTileBytes >> 4));
    }
  }

  // The last key tile, where there is one.
  __device__ __forceinline__ void multiply_rope() {
    if constexpr (Config::kHasRope) {
      storage.rope_full[ropes.stage].wait(ropes.full);
      multiply_tile(Config::kValueTiles, sm100::descriptor_128b(smem_address(storage.ropes[ropes.stage])));
      commit(storage.rope_free[ropes.stage]);
      ropes.advance();
    }
  }

  // Entries of a tile of P times the next stage, for a chunk of the output.
  __device__ __forceinline__ void multiply_values(int chunk, const uint8_t* p, bool accumulate) {
    const uint32_t output = tmem + Config::kOutputColumn + chunk * Config::kChunkColumns;
    const uint64_t a = sm100::descriptor_128b(smem_address(p));
    const uint32_t tiles = smem_address(storage.stages[values_stage]);
    const uint64_t b = sm100::descriptor_128b_transposed(tiles, sm100::kTileBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply(output, a + (step * kStepBytes >> 4), b + (step * kTransposedStepBytes >> 4), kValues,
               accumulate || step != 0);
    }
    commit(storage.free[values_stage]);
    values_stage = next(values_stage);
  }
};

}  // namespace cupymla::sparse_mla_fwd
