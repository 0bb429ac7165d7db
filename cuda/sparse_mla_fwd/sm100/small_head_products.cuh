// The thread that issues all products of a CTA by itself: S = Q K^T of a block, and amid them O += P V of the block
// before it.
#pragma once

#include "product_steps.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Storage, bool kFp16>
struct SmallHeadProducts : ProductSteps<Storage, kFp16> {
  using Base = ProductSteps<Storage, kFp16>;
  using Config = typename Base::Config;
  using Base::storage, Base::params, Base::cta, Base::lengths, Base::q_parity;
  using Base::commit, Base::take_keys, Base::keys_of, Base::multiply_tile, Base::multiply_stage, Base::multiply_values;

  using Base::Base;

  __device__ __forceinline__ void run() {
    for_each_item(params, cta, [&](uint32_t item) {
      const Work<Config> work(params, item, cta, lengths.next());
      if (work.blocks == 0) return;
      Base::pass_query_stages();
      storage.q_full.wait(q_parity);
      for (int32_t block = 0; block < work.blocks; ++block) {
        first_scores(block == 0);
        if (block > 0) values(block == 1);
        other_scores();
      }
      commit(storage.q_free);
      q_parity ^= 1u;
      values(work.blocks == 1);
      commit(storage.o_full);
    });
  }

  // Those of a block's first stage, among whose tiles is the first that Q has in Tensor Memory.
  __device__ __forceinline__ void first_scores(bool first_block) {
    Base::begin_scores();
    const uint64_t keys = keys_of(take_keys());
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
    for (int part = 1; part < Config::kBlockStages; ++part) multiply_stage(part, keys_of(take_keys()));
    Base::multiply_rope();
    commit(storage.s_ready);
  }

  // Each stage, whose keys have been multiplied, is the values of a chunk of the output.
  __device__ __forceinline__ void values(bool first_block) {
    Base::begin_values(first_block);
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) multiply_values(chunk, storage.p[0], !first_block);
  }
};

}  // namespace cupymla::sparse_mla_fwd
