// The two worker warpgroups where heads are many. A thread's row is a head: of it a thread works out P and dS in 16
// entries.
#pragma once

#include "../../common/math.cuh"
#include "../../common/reduction.cuh"
#include "../sink.cuh"
#include "pair_worker.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element>
struct Worker : PairWorker<Storage<Config>, Element> {
  using Base = PairWorker<Storage<Config>, Element>;
  using Base::kColumns, Base::storage, Base::params, Base::rank, Base::group, Base::warp, Base::lane, Base::row;
  using Base::own_column, Base::state;
  using Base::arrive_at_both, Base::publish_to_both, Base::sum_own_channels;

  // Of the head: lse and factor are what `Log2Lse` is, lse +inf where there is no head; share is what the sink leaves
  // of the softmax, times the factor.
  float lse, factor, share, delta;
  bool has_head;
  bool occupied;  // whether a KV block of this one had a valid entry

  using Base::Base;

  // Before a head block's first block. Q and dO are in shared memory from here on.
  __device__ __forceinline__ void begin_head_block(const QueryPosition& query, int32_t head_block) {
    const int32_t first_head = head_block * Config::kHeads;
    const uint32_t parity = head_block & 1;
    const int32_t head = first_head + row;
    has_head = head < params.h_q;
    Log2Lse log2{positive_infinity(), 1.f};
    share = 1.f;
    if (has_head) {
      const float given = read_lse(params, query, head);
      log2 = log2_lse(given, params.unit, params.unit_rest);
      share = share_beside_sink(params, head, given) * log2.factor;
    }
    lse = log2.rounded;
    factor = log2.factor;
    storage.heads_full.wait(parity);
    sum_own_channels(query, first_head);
    publish_to_both(storage.delta_full);
    cluster_wait_at(storage.delta_full, parity);
    delta = storage.delta[0][row] + storage.delta[1][row];
  }

  // From S and dP of the block in both CTAs to P and dS in both CTAs.
  __device__ __forceinline__ void make_tiles(float* attn_dist, int32_t entries_left) {
    storage.entries_full[state.set()].wait(state.set_parity());
    const auto& valid = storage.valid[state.set()];
    occupied = occupied || (valid[0] | valid[1]) != 0;
    const uint32_t mask = has_head ? valid[own_column / 32] >> own_column % 32 : 0u;
    float probabilities[kColumns], gradients[kColumns];
    // Staging lies where P and dS of the block before are.
    storage.tiles_free.wait(state.parity() ^ 1u);
    Base::template sum_over_channels<0>(probabilities);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = exp2_approx(fmaf(probabilities[i], params.scale_log2, -lse));
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
    }
    if (attn_dist != nullptr) add_distribution(attn_dist + own_column, entries_left - own_column, probabilities);
    Base::template sum_over_channels<1>(gradients);
    arrive_at_both(storage.consumed);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = probabilities[i] * share, ds = p * (gradients[i] - delta) * params.sm_scale;
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
      gradients[i] = (mask >> i & 1u) != 0 ? ds : 0.f;
    }
    storage.consumed.wait(state.parity());
    Base::store_tiles(probabilities, gradients);
  }

  // Adds to the distribution what all heads of the head block have in this warpgroup's 16 entries, given P but for the
  // head's factor. One thread of one CTA adds to an entry, in each head block.
  __device__ __forceinline__ void add_distribution(float* start, int32_t entries_left,
                                                   const float (&probabilities)[kColumns]) {
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float sum = probabilities[i] * factor;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      own = lane == i ? sum : own;
    }
    if (lane < kColumns) storage.distribution[group][warp][lane] = own;
    named_barrier_sync(kDistribution + group, Config::kWarpgroup);
    if (row < kColumns && row < entries_left) {
      const auto& sums = storage.distribution[group];
      reduce_add_float(start + row, (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]));
    }
    named_barrier_sync(kDistribution + group, Config::kWarpgroup);
  }
};

}  // namespace cupymla::sparse_mla_bwd
