// The thread that issues all products of the pair: S = Q K^T of one block, then O += P V of the block before it.
#pragma once

#include "../../common/cluster_exchange.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, bool kFp16>
struct Products {
  static constexpr uint32_t kStepBytes = 32;             // 16 elements along K of a row
  static constexpr uint32_t kTransposedStepBytes = 2048;  // 16 rows
  static constexpr int kSteps = 4;                       // of 16, in a tile
  static constexpr uint32_t kValues =
      sm100::instruction_f16(Config::kPairHeads, Config::kCtas * Config::kChunkColumns, kFp16, false, true);

  Storage<Config>& storage;
  const Parameters& params;
  const Place<Config> place;
  const uint32_t tmem;
  const uint16_t pair = static_cast<uint16_t>(3u << place.leader);  // both CTAs, for commits
  Ring<Config::kStages> ring;
  uint32_t q_parity = 0, p_parity = 0;
  uint32_t s_parity = 1, o_parity = 1;  // of s_free and o_free

  __device__ __forceinline__ Products(Storage<Config>& storage, const Parameters& params)
      : storage(storage), params(params), tmem(storage.tmem) {}

  __device__ __forceinline__ void run() {
    for_each_item(params, place, [&](uint32_t item) {
      const Work<Config> work(params, item, place);
      if (work.blocks == 0) return;
      storage.q_full.wait(q_parity);
      q_parity ^= 1u;
      for (int32_t block = 0; block < work.blocks; ++block) {
        scores(work.groups(block));
        if (block + 1 == work.blocks) sm100::commit_to_pair(storage.q_free, pair);
        if (block > 0) values(block - 1, work.groups(block - 1));
      }
      values(work.blocks - 1, work.groups(work.blocks - 1));
      sm100::commit_to_pair(storage.o_full, pair);
    });
  }

  // Hands the stage back once its products are done.
  __device__ __forceinline__ void release_stage() {
    sm100::commit_to_pair(storage.free[ring.stage], pair);
    ring.advance();
  }

  __device__ __forceinline__ void scores(int groups) {
    cluster_wait_at(storage.s_free, s_parity);
    s_parity ^= 1u;
    sm100::fence_after_sync();
    const uint32_t instruction =
        sm100::instruction_f16(Config::kPairHeads, Config::kCtas * groups * sm100::kGroupSlots, kFp16);
    const uint64_t q = sm100::descriptor_128b(smem_address(storage.q[0]));
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      storage.full[ring.stage].wait(ring.full);
      const uint64_t a = q + tile * (sm100::kTileBytes >> 4);
      const uint64_t b = sm100::descriptor_128b(smem_address(storage.stages[ring.stage]));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t offset = step * kStepBytes >> 4;
        sm100::mma_f16<2>(tmem + Config::kScoresColumn, a + offset, b + offset, instruction, tile + step != 0);
      }
      release_stage();
    }
    sm100::commit_to_pair(storage.s_ready, pair);
  }

  __device__ __forceinline__ void values(int32_t block, int groups) {
    cluster_wait_at(storage.p_ready, p_parity);
    p_parity ^= 1u;
    if (block == 0) {
      cluster_wait_at(storage.o_free, o_parity);
      o_parity ^= 1u;
    }
    sm100::fence_after_sync();
    const uint64_t p = sm100::descriptor_128b(smem_address(storage.p[0]));
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      const uint32_t output = tmem + Config::kOutputColumn + chunk * Config::kChunkColumns;
      for (int group = 0; group < Config::kCtas * groups; ++group) {
        storage.full[ring.stage].wait(ring.full);
        const uint64_t a = p + group * (sm100::kTileBytes >> 4);
        const uint64_t b =
            sm100::descriptor_128b_transposed(smem_address(storage.stages[ring.stage]), sm100::kTileBytes);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          sm100::mma_f16<2>(output, a + (step * kStepBytes >> 4), b + (step * kTransposedStepBytes >> 4), kValues,
                            block + group + step != 0);
        }
        release_stage();
      }
    }
    sm100::commit_to_pair(storage.pv_done, pair);
  }
};

}  // namespace cupymla::sparse_mla_fwd
