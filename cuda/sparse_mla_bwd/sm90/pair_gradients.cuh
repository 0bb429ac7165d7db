// The second half of a consumer's work on a block, in a pair of CTAs: dQ of 64 heads, and of the block's dKV 64 and 64
// columns of the values and sixteen of the RoPE, all of this CTA's.
#pragma once

#include "pair_consumer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWho>
struct PairGradients {
  using ThisConsumer = PairConsumer<Config, Element, kWho>;
  static constexpr int kSlotSteps = Config::kSlots / 16;  // wgmma k steps over 64 slots
  static constexpr int kHeadSteps = Config::kHeads / 16;  // over 128 heads
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;              // from sixteen rows of a tile to the next
  static constexpr uint32_t kNarrowStepBytes = 2 * kNarrowSwizzleAtomBytes;  // the same of narrow ones
  static constexpr int kTileSums = Config::kSlots * Config::kTileColumns / Config::kWarpgroup;
  static constexpr int kRopeShare = Config::kRopeColumns / Config::kConsumers;
  static constexpr int kRopeSums = Config::kSlots * kRopeShare / Config::kWarpgroup;
  static_assert(Config::kValueTiles == 2 * Config::kConsumers);

  ThisConsumer& consumer;
  PairStorage<Config>& storage;

  __device__ __forceinline__ explicit PairGradients(ThisConsumer& consumer)
      : consumer(consumer), storage(consumer.storage) {}

  // dQ += dS K; left in flight.
  __device__ __forceinline__ void issue_query_gradient() {
    const uint32_t base = consumer.uniform_base();
    sm90::pin_registers(consumer.dq_wide);
    sm90::pin_registers(consumer.dq_narrow);
    const uint64_t ds = sm90::mn_major_descriptor(
        consumer.place_from(base, storage.weights[kOfScoreGradients][0]) + consumer.who * Config::kTileBytes, Config::kTileBytes);
    const uint64_t k = sm90::mn_major_descriptor(consumer.place_from(base, storage.k[0]), Config::kTileBytes);
    const uint64_t rope = sm90::narrow_mn_major_descriptor(consumer.place_from(base, storage.k_rope));
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSlotSteps; ++step) {
      const uint64_t a = sm90::descriptor_advance(ds, step * kStepBytes);
      sm90::mma<typename PairAtoms<Element>::QueryWide>(consumer.dq_wide, a,
                                                        sm90::descriptor_advance(k, step * kStepBytes));
      if constexpr (Config::kHasRope) {
        sm90::mma<typename PairAtoms<Element>::QueryNarrow>(consumer.dq_narrow, a,
                                                            sm90::descriptor_advance(rope, step * kNarrowStepBytes));
      }
    }
    sm90::wgmma_commit();
  }

  // Where a k step of sixteen heads begins in the tiles of P or dS.
  template <int kOf>
  __device__ __forceinline__ uint64_t weights_of(uint32_t base, int step) const {
    const uint64_t tile = sm90::k_major_descriptor(consumer.place_from(base, storage.weights[kOf][0]));
    return sm90::descriptor_advance(tile, step / 4 * Config::kTileBytes + step % 4 * 32);
  }

  // sums = dS^T Q + P^T dO over one of this consumer's two column tiles.
  // `between` as for scores.
  template <typename Between>
  __device__ __forceinline__ void issue_key_gradient(float (&sums)[kTileSums], int which, Between between) {
    const uint32_t base = consumer.uniform_base();
    const uint32_t offset = (consumer.who * Config::kConsumers + which) * Config::kHeadTileBytes;
    const uint64_t q = sm90::mn_major_descriptor(consumer.place_from(base, storage.q[0]) + offset, Config::kHeadTileBytes);
    const uint64_t dout = sm90::mn_major_descriptor(consumer.place_from(base, storage.dout[0]) + offset, Config::kHeadTileBytes);
    sm90::forget_registers(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename PairAtoms<Element>::Key>(sums, weights_of<kOfScoreGradients>(base, step),
                                                  sm90::descriptor_advance(q, step * kStepBytes), step == 0);
      between(step);
    }
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename PairAtoms<Element>::Key>(sums, weights_of<kOfScores>(base, step),
                                                  sm90::descriptor_advance(dout, step * kStepBytes));
      between(kHeadSteps + step);
    }
    sm90::wgmma_commit();
  }

  // The same over its half of the RoPE's columns, which are no part of values.
  __device__ __forceinline__ void issue_rope(float (&sums)[kRopeSums]) {
    const uint32_t base = consumer.uniform_base();
    const uint64_t q =
        sm90::narrow_mn_major_descriptor(consumer.place_from(base, storage.q_rope) + consumer.who * kRopeShare * 2);
    sm90::forget_registers(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      sm90::mma<typename PairAtoms<Element>::KeyNarrow>(sums, weights_of<kOfScoreGradients>(base, step),
                                                        sm90::descriptor_advance(q, step * kNarrowStepBytes),
                                                        step == 0);
    }
    sm90::wgmma_commit();
  }

  // The first column of either tile among the CTA's, and of the RoPE's columns.
  static __device__ __forceinline__ constexpr int32_t column_of(int which) {
    return (kWho * Config::kConsumers + which) * Config::kTileColumns;
  }
  static __device__ __forceinline__ int32_t rope_column() {
    return Config::kDV + static_cast<int32_t>(cluster_rank()) * Config::kRopeColumns + kWho * kRopeShare -
           ThisConsumer::first_column();
  }

  // A part of a tile, behind every other product of those that it is sent among.
  __device__ __forceinline__ void send_between(const float (&sums)[kTileSums], int which, int product) const {
    if (!Config::kPartials && product % 2 == 1 && product / 2 < kTileSums / 4) {
      consumer.targets.send(sums, column_of(which), product / 2, false);
    }
  }

  // What is not sent among products.
  __device__ __forceinline__ void send_behind(const float (&sums)[kTileSums], int which) const {
    if (Config::kPartials) consumer.targets.send_all(sums, column_of(which), consumer.pass() > 0);
  }

  // The products of the block, of which the first tile is sent, and the second is left in `second`. `is_last`: of all.
  __device__ __forceinline__ void run(float (&second)[kTileSums], bool is_last) {
    float rope[kRopeSums];
    if constexpr (Config::kHasRope) issue_rope(rope);
    issue_query_gradient();
    if constexpr (Config::kHasRope) {
      sm90::wgmma_wait<1>();
      sm90::pin_registers(rope);
      consumer.targets.arrange(rope, consumer.fresh_thread());
      consumer.targets.send_half(rope, rope_column(), consumer.pass() > 0, consumer.fresh_thread());
    }
    float first[kTileSums];
    issue_key_gradient(first, 0, [](int) {});
    sm90::wgmma_wait<1>();
    sm90::pin_registers(consumer.dq_wide);
    sm90::pin_registers(consumer.dq_narrow);
    storage.free.arrive();
    sm90::wgmma_wait<0>();
    sm90::pin_registers(first);
    consumer.targets.arrange(first, consumer.fresh_thread());
    issue_key_gradient(second, 1, [&](int product) { send_between(first, 0, product); });
    send_behind(first, 0);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(second);
    consumer.targets.arrange(second, consumer.fresh_thread());
    give_room(is_last);
  }

  // No product of the block reads P or dS any more. Behind the last block nobody waits to hear it.
  __device__ __forceinline__ void give_room(bool is_last) {
    storage.tiles_free.arrive();
    __syncwarp();
    if (!is_last && consumer.fresh_thread() % 32 == 0) {
      cluster_arrive_after_reads_at(consumer.at_other(smem_address(&storage.room)));
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
