// The multiplier: one thread of the leader, which gives the Tensor Core the products of keys with Q, for both CTAs of a
// pair. Keys are the rows of A, each CTA its own 128; heads are the rows of B, half of them in each CTA.
#pragma once

#include "../../common/sm100/tcgen05.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config, bool kFp16>
struct Multiplier {
  Storage<Config>& storage;
  HeadBlockRing<Config> head_blocks;
  Ring<Config::kStages> keys;
  Ring<Config::kAccumulators> accumulators;
  uint32_t q_parity = 0;

  __device__ __forceinline__ explicit Multiplier(Storage<Config>& storage) : storage(storage), head_blocks(storage) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const HeadBlock& head_block = head_blocks.wait();
      const uint32_t heads = padded_heads<Config>(head_block);
      const int32_t blocks = head_block.end_block - head_block.begin_block;
      const bool last = head_block.last();
      head_blocks.release();
      head_blocks.advance();
      if (last) break;
      for (int32_t block = 0; block < blocks; ++block) multiply(heads, block == 0, block + 1 == blocks);
      if (blocks != 0) q_parity ^= 1u;
    }
  }

  __device__ __forceinline__ void multiply(uint32_t heads, bool first, bool last) {
    const uint32_t instruction = sm100::instruction_f16(Config::kTileKeys, heads, kFp16);
    storage.taken[accumulators.stage].wait(accumulators.free());
    sm100::fence_after_sync();
    const uint32_t d = storage.tmem + accumulators.stage * Config::kHeads;
#pragma unroll 1
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (first) storage.q_full[tile].wait(q_parity);
      storage.k_full[keys.stage].wait(keys.full);
      const uint64_t a = sm100::descriptor_128b(smem_address(storage.k[keys.stage]));
      const uint64_t b = sm100::descriptor_128b(smem_address(storage.q[tile]));
#pragma unroll
      for (int step = 0; step < Config::kTileColumns / 16; ++step) {
        sm100::mma_f16<Config::kCtas>(d, a + 2 * step, b + 2 * step, instruction, tile + step != 0);
      }
      commit(storage.k_free[keys.stage]);
      if (last) commit(storage.q_free[tile]);
      keys.advance();
    }
    commit(storage.done[accumulators.stage]);
    accumulators.advance();
  }

  __device__ __forceinline__ void commit(Mbarrier& barrier) {
    if constexpr (Config::kCtas == 2) {
      sm100::commit_to_pair(barrier);
    } else {
      sm100::commit(barrier);
    }
  }
};

}  // namespace cupymla::attn_dist
