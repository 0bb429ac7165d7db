// The two worker warpgroups of the small-head variant. A thread's row is an entry: of it a thread works out P and dS of
// 16 heads.
#pragma once

#include "../../common/math.cuh"
#include "../sink.cuh"
#include "small_head_storage.cuh"
#include "pair_worker.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element>
struct SmallHeadWorker : PairWorker<SmallHeadStorage<Config>, Element> {
  using Base = PairWorker<SmallHeadStorage<Config>, Element>;
  using Base::kColumns, Base::storage, Base::params, Base::rank, Base::group, Base::warp, Base::lane, Base::row;
  using Base::own_column, Base::state, Base::publish_to_both, Base::sum_own_channels;

  bool occupied = false;  // whether a block had a valid entry

  using Base::Base;

  // Before the first block. Q and dO are in shared memory from here on.
  __device__ __forceinline__ void begin(const QueryPosition& query) {
    if (group == 0 && row < Config::kHeads) {
      Log2Lse lse{positive_infinity(), 1.f};
      float share = 1.f;
      if (row < params.h_q) {
        const float given = read_lse(params, query, row);
        lse = log2_lse(given, params.unit, params.unit_rest);
        share = share_beside_sink(params, row, given) * lse.factor;
      }
      storage.lse[row] = lse.rounded;
      storage.factor[row] = lse.factor;
      storage.share[row] = share;
    }
    storage.heads_full.wait(0);
    sum_own_channels(query, 0);
    publish_to_both(storage.delta_full);
    cluster_wait_at(storage.delta_full, 0);
  }

  // From S and dP of the block in both CTAs to P and dS in both CTAs.
  __device__ __forceinline__ void make_tiles(float* attn_dist, int32_t entries_left) {
    storage.entries_full[state.set()].wait(state.set_parity());
    const auto& valid = storage.valid[state.set()];
    occupied = occupied || (valid[0] | valid[1] | valid[2] | valid[3]) != 0;
    const int heads = max(0, min(kColumns, params.h_q - own_column));
    const uint32_t mask = (valid[warp] >> lane & 1u) != 0 ? (1u << heads) - 1 : 0u;
    float probabilities[kColumns], gradients[kColumns];
    Base::template sum_over_channels<0>(probabilities);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = exp2_approx(fmaf(probabilities[i], params.scale_log2, -storage.lse[own_column + i]));
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
    }
    if (attn_dist != nullptr) add_distribution(attn_dist, entries_left, probabilities);
    Base::template sum_over_channels<1>(gradients);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int head = own_column + i;
      const float delta = storage.delta[0][head] + storage.delta[1][head];
      const float p = probabilities[i] * storage.share[head], ds = p * (gradients[i] - delta) * params.sm_scale;
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
      gradients[i] = (mask >> i & 1u) != 0 ? ds : 0.f;
    }
    storage.tiles_free.wait(state.parity() ^ 1u);
    Base::store_tiles(probabilities, gradients);
  }

  // Adds to the distribution what this CTA's heads have in every entry, given P but for their factors. Each CTA adds
  // once to an entry that was cleared, and the sum of two does not depend on their order.
  __device__ __forceinline__ void add_distribution(float* start, int32_t entries_left,
                                                   const float (&probabilities)[kColumns]) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sum = fmaf(probabilities[i], storage.factor[own_column + i], sum);
    }
    if (group == 1) storage.distribution[row] = sum;
    named_barrier_sync(kWorkers, Config::kWorkerThreads);
    if (group == 0 && row < entries_left) reduce_add_float(start + row, sum + storage.distribution[row]);
  }
};

}  // namespace cupymla::sparse_mla_bwd
