// The thread that issues all products of the pair: S = Q K^T of one block, then O += P V of the block before it.
#pragma once

#include "product_steps.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Storage, bool kFp16>
struct Products : ProductSteps<Storage, kFp16> {
  using Base = ProductSteps<Storage, kFp16>;
  using Config = typename Base::Config;
  using Base::storage, Base::params, Base::cta, Base::lengths, Base::q_parity, Base::values_stage;
  using Base::commit, Base::take_keys, Base::keys_of, Base::multiply_stage, Base::multiply_rope, Base::multiply_values;

  Phases values_phases;  // stages of Q have none

  using Base::Base;

  __device__ __forceinline__ void run() {
    for_each_item(params, cta, [&](uint32_t item) {
      const Work<Config> work(params, item, cta, lengths.next());
      if (work.blocks == 0) return;
      Base::pass_query_stages();
      storage.q_ready.wait(q_parity);
      storage.q_full.wait(q_parity);
      q_parity ^= 1u;
      for (int32_t block = 0; block < work.blocks; ++block) {
        scores();
        if (block + 1 == work.blocks) commit(storage.q_free);
        if (block > 0) values(block == 1);
      }
      values(work.blocks == 1);
      commit(storage.o_full);
    });
  }

  __device__ __forceinline__ void scores() {
    Base::begin_scores();
#pragma unroll
    for (int part = 0; part < Config::kBlockStages; ++part) {
      const uint32_t stage = take_keys();
      multiply_stage(part, keys_of(stage));
      commit(storage.keys_read[stage]);
    }
    multiply_rope();
    commit(storage.s_ready);
  }

  __device__ __forceinline__ void values(bool first_block) {
    Base::begin_values(first_block);
    // In the order of the stages, which is that in which they come and are needed again.
#pragma unroll
    for (int part = 0; part < Config::kBlockStages; ++part) {
      const int half = part / Config::kChunks;
      storage.values[values_stage].wait(values_phases.full(values_stage));
      values_phases.advance(values_stage);
      multiply_values(part % Config::kChunks, storage.p[half], !first_block || half != 0);
    }
    commit(storage.pv_done);
  }
};

}  // namespace cupymla::sparse_mla_fwd
