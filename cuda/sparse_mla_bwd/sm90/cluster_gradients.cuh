// The second half of a consumer's work on a block, in a 2-CTA cluster: dQ of 64 heads, and of the block's dKV 64 and 64
// columns of the values and sixteen of the RoPE, all of this CTA's.
#pragma once

#include "cluster_consumer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWarpgroupIdx>
struct ClusterGradients {
  using ThisConsumer = ClusterConsumer<Config, Element, kWarpgroupIdx>;
  static constexpr int kKeySteps = Config::kTileKeys / 16;  // wgmma k steps over 64 entries
  static constexpr int kHeadSteps = Config::kHeads / 16;  // over 128 heads
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;              // from sixteen rows of a tile to the next
  static constexpr uint32_t kSwizzle64StepBytes = 2 * kSwizzle64AtomBytes;   // the same of narrow ones
  static constexpr int kTileSums = Config::kTileKeys * Config::kTileColumns / Config::kWarpgroup;
  static constexpr int kRopeShare = Config::kRopeColumns / Config::kConsumers;
  static constexpr int kRopeSums = Config::kTileKeys * kRopeShare / Config::kWarpgroup;
  static_assert(Config::kValueTiles == 2 * Config::kConsumers);

  ThisConsumer& consumer;
  ClusterStorage<Config>& storage;

  __device__ __forceinline__ explicit ClusterGradients(ThisConsumer& consumer)
      : consumer(consumer), storage(consumer.storage) {}

  // dQ += dS K; left in flight.
  __device__ __forceinline__ void issue_query_gradient() {
    const uint32_t base = uniform_base(storage);
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
    const uint32_t tile = place_from(base, storage, storage.p_ds[kOfScoreGradients][kWarpgroupIdx]);
    const uint64_t ds = sm90::mn_major_descriptor(tile, Config::kTileBytes);
    const uint64_t k = sm90::mn_major_descriptor(place_from(base, storage, storage.k[0]), Config::kTileBytes);
    const uint64_t rope = sm90::swizzle_64_mn_major_descriptor(place_from(base, storage, storage.k_rope));
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const uint64_t a = sm90::descriptor_advance(ds, step * kStepBytes);
      sm90::mma<typename ClusterAtoms<Element>::QueryWide>(consumer.dq_wide, a,
                                                           sm90::descriptor_advance(k, step * kStepBytes));
      if constexpr (Config::kHasRope) {
        sm90::mma<typename ClusterAtoms<Element>::QueryNarrow>(consumer.dq_narrow, a,
                                                            sm90::descriptor_advance(rope, step * kSwizzle64StepBytes));
      }
    }
    sm90::wgmma_commit();
  }

  // Where a k step of sixteen heads begins in the tiles of P or dS.
  template <int kOf>
  __device__ __forceinline__ uint64_t p_ds_of(uint32_t base, int step) const {
    const uint64_t tile = sm90::k_major_descriptor(place_from(base, storage, storage.p_ds[kOf][0]));
    return sm90::descriptor_advance(tile, step / 4 * Config::kTileBytes + step % 4 * 32);
  }

  // sums = dS^T Q + P^T dO over one of this consumer's two column tiles.
  // `between` as for scores.
  template <typename Between>
  __device__ __forceinline__ void issue_key_gradient(float (&sums)[kTileSums], int which, Between between) {
    const uint32_t base = uniform_base(storage);
    const uint32_t offset = (kWarpgroupIdx * Config::kConsumers + which) * Config::kHeadTileBytes;
    const auto descriptor = [&](const uint8_t* tiles) {
      return sm90::mn_major_descriptor(place_from(base, storage, tiles) + offset, Config::kHeadTileBytes);
    };
    const uint64_t q = descriptor(storage.q[0]), dout = descriptor(storage.dout[0]);
    sm90::warpgroup_discard_operand(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename ClusterAtoms<Element>::Key>(sums, p_ds_of<kOfScoreGradients>(base, step),
                                                     sm90::descriptor_advance(q, step * kStepBytes), step == 0);
      between(step);
    }
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename ClusterAtoms<Element>::Key>(sums, p_ds_of<kOfScores>(base, step),
                                                     sm90::descriptor_advance(dout, step * kStepBytes));
      between(kHeadSteps + step);
    }
    sm90::wgmma_commit();
  }

  // The same over its half of the RoPE's columns, which are no part of values.
  __device__ __forceinline__ void issue_rope(float (&sums)[kRopeSums]) {
    const uint32_t base = uniform_base(storage);
    const uint64_t q =
        sm90::swizzle_64_mn_major_descriptor(place_from(base, storage, storage.q_rope) +
                                             kWarpgroupIdx * kRopeShare * 2);
    sm90::warpgroup_discard_operand(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename ClusterAtoms<Element>::KeyNarrow>(sums, p_ds_of<kOfScoreGradients>(base, step),
                                                           sm90::descriptor_advance(q, step * kSwizzle64StepBytes),
                                                           step == 0);
    }
    sm90::wgmma_commit();
  }

  // Where a tile goes, and this consumer's columns of the RoPE.
  __device__ __forceinline__ ClusterRowTargets<Config> places_of(int which) const {
    const int32_t column =
        ThisConsumer::first_column() + (kWarpgroupIdx * Config::kConsumers + which) * Config::kTileColumns;
    return ClusterRowTargets<Config>(consumer.params, consumer.rows, column, consumer.fresh_thread());
  }
  __device__ __forceinline__ ClusterRowTargets<Config> places_of_rope() const {
    const int32_t rank = static_cast<int32_t>(asked_rank());
    const int32_t column = Config::kDV + rank * Config::kRopeColumns + kWarpgroupIdx * kRopeShare;
    return ClusterRowTargets<Config>(consumer.params, consumer.rows, column, consumer.fresh_thread());
  }

  // A part of a tile, behind every other product of those that it is sent among.
  static __device__ __forceinline__ void send_between(const ClusterRowTargets<Config>& places,
                                                      const float (&sums)[kTileSums], int product) {
    if (!Config::kPartials && product % 2 == 1 && product / 2 < ClusterRowTargets<Config>::kTileParts) {
      places.send(sums, product / 2, false);
    }
  }

  // What is not sent among products.
  __device__ __forceinline__ void send_behind(const ClusterRowTargets<Config>& places,
                                              const float (&sums)[kTileSums]) const {
    if constexpr (Config::kPartials) {
#pragma unroll
      for (int part = 0; part < ClusterRowTargets<Config>::kTileParts; ++part) {
        places.send(sums, part, consumer.head_block() > 0);
      }
    }
  }

  // The products of the block, of which the first tile is sent, and the second is left in `second`. `is_last`: of all.
  __device__ __forceinline__ void run(float (&second)[kTileSums], bool is_last) {
    float rope[kRopeSums];
    if constexpr (Config::kHasRope) issue_rope(rope);
    issue_query_gradient();
    if constexpr (Config::kHasRope) {
      sm90::wgmma_wait<1>();
      sm90::warpgroup_fence_operand(rope);
      ClusterRowTargets<Config>::arrange_half(rope, consumer.fresh_thread());
      places_of_rope().send_half(rope, consumer.head_block() > 0, consumer.fresh_thread());
    }
    float first[kTileSums];
    issue_key_gradient(first, 0, [](int) {});
    sm90::wgmma_wait<1>();
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
    storage.free.arrive();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(first);
    ClusterRowTargets<Config>::arrange(first, consumer.fresh_thread());
    const auto places = places_of(0);
    issue_key_gradient(second, 1, [&](int product) { send_between(places, first, product); });
    send_behind(places, first);
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(second);
    ClusterRowTargets<Config>::arrange(second, consumer.fresh_thread());
    give_room(is_last);
  }

  // No product of the block reads P or dS any more, which the other CTA waits for. Behind the last block nobody does.
  __device__ __forceinline__ void give_room(bool is_last) {
    __syncwarp();
    if (!is_last && consumer.fresh_thread() % 32 == 0) {
      cluster_arrive_after_reads_at(consumer.at_other(smem_address(&storage.room)));
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
