// The second half of a consumer's work on a block: its columns of dQ and of the block's dKV.
#pragma once

#include "../../common/cluster_exchange.cuh"
#include "consumer.cuh"
#include "row_targets.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWho>
struct Gradients {
  using ThisConsumer = Consumer<Config, Element, kWho>;
  static constexpr int kSteps = ThisConsumer::kSteps;
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;  // from sixteen rows of a tile to the next
  // The tile past the values: one consumer has its dKV, the other its dQ.
  static constexpr int kRopeTile = Config::kValueTiles;
  static constexpr bool kHasKeyRope = Config::kHasRope && !ThisConsumer::kHasNarrow;
  static constexpr int kTileSums = Config::kSlots * Config::kTileColumns / Config::kWarpgroup;
  static_assert(kTileSums == ThisConsumer::kScores, "consumer 1's second tile of sums is where its scores were");

  ThisConsumer& consumer;
  Storage<Config>& storage;
  RowTargets<Config> targets;

  __device__ __forceinline__ Gradients(ThisConsumer& consumer, const RowTargets<Config>& targets)
      : consumer(consumer), storage(consumer.storage), targets(targets) {}

  // `more`: whether there is another block.
  __device__ __forceinline__ void run(bool more) {
    constexpr int kFirst = kWho * Config::kHalfTiles;
    static_assert(Config::kHalfTiles == 4);
    if constexpr (Config::kCluster == 1) {
      constexpr int kLast = kHasKeyRope ? kRopeTile : kFirst + Config::kHalfTiles - 1;
      keep_first(kFirst);
      keep(kFirst + 1, true);
      keep_and_multiply_ahead(kFirst + 2, more);
      if constexpr (kHasKeyRope) keep(kFirst + 3, false);
      keep_last<!kHasKeyRope>(kLast);
    } else {
      begin_query_gradient();
      if constexpr (kWho == 0) give_up_staging();
      sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) issue_wide(step);
      sm90::wgmma_commit();
      if constexpr (kWho == 1) {
        exchange_by_turns(more);
      } else {
        exchange(kFirst, true, false);
        exchange(kFirst + 2, false, true);
      }
    }
  }

  __device__ __forceinline__ void begin_query_gradient() {
    sm90::pin_registers(consumer.dq_wide);
    sm90::pin_registers(consumer.dq_narrow);
  }

  // dQ += dS K, over the own columns and sixteen slots; left in flight. The RoPE's columns are consumer 0's.
  __device__ __forceinline__ void issue_wide(int step) {
    const uint64_t k = sm90::mn_major_descriptor(smem_address(storage.k[0][kWho * Config::kHalfTiles]),
                                                 Config::kTileBytes);
    sm90::mma<typename Atoms<Element>::QueryWide>(consumer.dq_wide, score_gradients(step),
                                                  sm90::descriptor_advance(k, step * kStepBytes));
  }

  __device__ __forceinline__ void issue_narrow(int step) {
    if constexpr (ThisConsumer::kHasNarrow) {
      const uint64_t k = sm90::mn_major_descriptor(smem_address(storage.k[0][kRopeTile]), Config::kTileBytes);
      sm90::mma<typename Atoms<Element>::QueryNarrow>(consumer.dq_narrow, score_gradients(step),
                                                      sm90::descriptor_advance(k, step * kStepBytes));
    }
  }

  __device__ __forceinline__ uint64_t score_gradients(int step) const {
    return sm90::descriptor_advance(sm90::k_major_descriptor(smem_address(storage.ds)), step * 32);
  }

  // Consumer 0 of two CTAs: of the right key tiles, where the other CTA is to leave its sums, its dQ takes the RoPE
  // alone. That comes first, and the rest when consumer 1 has what it sends first, and would no longer be held up.
  __device__ __forceinline__ void give_up_staging() {
    if constexpr (ThisConsumer::kHasNarrow) {
      sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) issue_narrow(step);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      sm90::pin_registers(consumer.dq_narrow);
    }
    storage.free[0][2].arrive();
    arrive_at_other(storage.staging_ready);
    storage.first_ready.wait(consumer.k_parity);
  }

  // sums = dS^T Q (+ P^T dO) over a column tile of Q and dO; left in flight.
  template <bool kValues>
  __device__ __forceinline__ void issue_key_gradient(float (&sums)[kTileSums], uint32_t tile) {
    const uint64_t ds = sm90::mn_major_descriptor(smem_address(storage.ds), Config::kTileBytes);
    const uint64_t q = sm90::mn_major_descriptor(smem_address(storage.q[tile]), Config::kTileBytes);
    sm90::pin_registers(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<typename Atoms<Element>::Key>(sums, sm90::descriptor_advance(ds, step * kStepBytes),
                                              sm90::descriptor_advance(q, step * kStepBytes), step == 0);
    }
    if constexpr (kValues) {
      const uint64_t p = sm90::mn_major_descriptor(smem_address(storage.p), Config::kTileBytes);
      const uint64_t dout = sm90::mn_major_descriptor(smem_address(storage.dout[tile]), Config::kTileBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm90::mma<typename Atoms<Element>::Key>(sums, sm90::descriptor_advance(p, step * kStepBytes),
                                                sm90::descriptor_advance(dout, step * kStepBytes));
      }
    }
    sm90::wgmma_commit();
  }

  // Waits for the products. Where those of dQ were issued before them, the block's keys are done with.
  __device__ __forceinline__ void finish(float (&sums)[kTileSums], bool after_query_gradient) {
    if (after_query_gradient) finish_query_gradient<1>();
    sm90::wgmma_wait<0>();
    sm90::pin_registers(sums);
  }

  // Of products issued after dQ's, `kPending` groups may be unfinished.
  template <int kPending>
  __device__ __forceinline__ void finish_query_gradient() {
    sm90::wgmma_wait<kPending>();
    sm90::pin_registers(consumer.dq_wide);
    sm90::pin_registers(consumer.dq_narrow);
    release_keys();
  }

  __device__ __forceinline__ void release_keys() {
    storage.free[0][0].arrive();
    if constexpr (Config::kCluster == 1) {
      storage.free[0][1].arrive();
      storage.free[0][2].arrive();
    } else if constexpr (kWho == 1) {
      // Its own staging it needs until the last sums are taken over.
      storage.free[0][1].arrive();
      arrive_at_other(storage.staging_ready);
    }
  }

  // One CTA to a query: a tile of dKV goes straight to global memory, the first of a block while dQ is multiplied. So
  // L2, which takes longest of all, has something to add again as soon as one product is done.
  __device__ __forceinline__ void keep_first(int32_t tile) {
    static_assert(kSteps == 2 * (Config::kTileColumns / RowTargets<Config>::kLine));
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, false);
    begin_query_gradient();
    const auto places = targets.places(consumer.lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::wgmma_fence();
      issue_wide(step);
      issue_narrow(step);
      sm90::wgmma_commit();
      if (step % 2 != 0) targets.send_line(sums, places, step / 2, tile * Config::kTileColumns, consumer.lane);
    }
  }

  __device__ __forceinline__ void keep(int32_t tile, bool after_query_gradient) {
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, after_query_gradient);
    targets.send(sums, tile * Config::kTileColumns, consumer.lane);
  }

  // While this one goes, for which L2 takes its time, a consumer with registers to spare multiplies its scores of the
  // next block. Their keys have been asked for since dQ was done.
  __device__ __forceinline__ void keep_and_multiply_ahead(int32_t tile, bool more) {
    static_assert(Config::kParts == 2 * (Config::kTileColumns / RowTargets<Config>::kLine));
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, false);
    if constexpr (ThisConsumer::kPartsAhead > 0) {
      if (more) {
        consumer.wait_for_next_keys();
        consumer.begin_scores();
        const auto places = targets.places(consumer.lane);
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
          consumer.issue_scores(part);
          if (part % 2 != 0) targets.send_line(sums, places, part / 2, tile * Config::kTileColumns, consumer.lane);
        }
        consumer.finish_scores();
        return;
      }
    }
    targets.send(sums, tile * Config::kTileColumns, consumer.lane);
  }

  template <bool kValues>
  __device__ __forceinline__ void keep_last(int32_t tile) {
    float sums[kTileSums];
    issue_key_gradient<kValues>(sums, tile);
    finish(sums, false);
    storage.tiles_free.arrive();
    targets.send(sums, tile * Config::kTileColumns, consumer.lane);
  }

  // Two CTAs to a query, and two tiles: the first CTA finishes the left one, the second the other. Each computes the
  // other's first and hands it over, then its own, to which it adds what it is handed.
  __device__ __forceinline__ void exchange(int32_t left_tile, bool first, bool last) {
    float sums[kTileSums];
    issue_key_gradient<true>(sums, other_tile(left_tile));
    finish(sums, first);
    hand_over(sums, first);
    issue_key_gradient<true>(sums, own_tile(left_tile));
    finish(sums, false);
    if (last) storage.tiles_free.arrive();
    take_over(sums, last);
    send_own(sums, left_tile);
  }

  static __device__ __forceinline__ int32_t own_tile(int32_t left_tile) {
    return left_tile + static_cast<int32_t>(cluster_rank());
  }
  static __device__ __forceinline__ int32_t other_tile(int32_t left_tile) {
    return left_tile + 1 - static_cast<int32_t>(cluster_rank());
  }

  __device__ __forceinline__ void send_own(float (&sums)[kTileSums], int32_t left_tile) {
    targets.send_arranged(sums, own_tile(left_tile) * Config::kTileColumns, consumer.lane);
  }

  // The same for consumer 1, which has registers for two tiles: the own one is multiplied while the other one is handed
  // over, and what is handed over next while the own one is sent. dQ is under way.
  __device__ __forceinline__ void exchange_by_turns(bool more) {
    constexpr int kLeft = Config::kHalfTiles;
    auto& own = consumer.scores;
    float sums[kTileSums];
    issue_key_gradient<true>(sums, other_tile(kLeft));
    issue_key_gradient<true>(own, own_tile(kLeft));
    finish_query_gradient<2>();
    finish_first_of_two(sums);
    storage.first_ready.arrive();
    hand_over(sums, true);
    finish(own, false);
    take_over(own, false);
    issue_key_gradient<true>(sums, other_tile(kLeft + 2));
    send_own(own, kLeft);
    issue_key_gradient<true>(own, own_tile(kLeft + 2));
    finish_first_of_two(sums);
    hand_over(sums, false);
    finish(own, false);
    if constexpr (kHasKeyRope) {
      take_over(own, false);
      issue_key_gradient<false>(sums, kRopeTile);
      send_own(own, kLeft + 2);
      finish(sums, false);
      storage.tiles_free.arrive();
      exchange_rope(sums, more);
    } else {
      storage.tiles_free.arrive();
      take_over(own, true);
      send_own(own, kLeft + 2);
      if (more) consumer.template multiply_scores<0, ThisConsumer::kPartsAhead>(consumer.k_parity ^ 1u);
    }
  }

  __device__ __forceinline__ void finish_first_of_two(float (&sums)[kTileSums]) {
    sm90::wgmma_wait<1>();
    sm90::pin_registers(sums);
  }

  // The RoPE tile has no partner: each CTA finishes half of its columns. While the halves cross, consumer 1 multiplies
  // what there are keys for of the next block's dP, but only as long as that: the right keys wait for its staging.
  __device__ __forceinline__ void exchange_rope(const float (&sums)[kTileSums], bool more) {
    const int32_t rank = static_cast<int32_t>(cluster_rank());
    float half[kTileSums / 2];
#pragma unroll
    for (int i = 0; i < kTileSums / 2; ++i) half[i] = rank == 0 ? sums[i + kTileSums / 2] : sums[i];
    hand_over(half, false);
#pragma unroll
    for (int i = 0; i < kTileSums / 2; ++i) half[i] = rank == 0 ? sums[i] : sums[i + kTileSums / 2];
    const int32_t column = Config::kDV + rank * (Config::kTileColumns / 2);
    if constexpr (ThisConsumer::kPartsAhead > 0) {
      static_assert(ThisConsumer::kPartsAhead == 2);
      if (more) {
        consumer.template wait_for_keys<0, 2>(consumer.k_parity ^ 1u);
        consumer.begin_scores();
        consumer.issue_scores(0);
        take_over(half, true);
        consumer.issue_scores(1);
        targets.send_arranged(half, column, consumer.lane);
        consumer.finish_scores();
        return;
      }
    }
    take_over(half, true);
    targets.send_arranged(half, column, consumer.lane);
  }

  // Stores sums in the other CTA's staging, once there is room. Consumer 1 begins, as it multiplies first: so one
  // consumer sends to the other CTA while the other one multiplies, or sends to L2.
  template <int kCount>
  __device__ __forceinline__ void hand_over(const float (&sums)[kCount], bool first) {
    if (first) {
      storage.staging_ready.wait(consumer.k_parity);
    } else {
      storage.drained[kWho].wait(consumer.rounds.full(kDrained));
      consumer.rounds.advance(kDrained);
    }
    store_at_other(sums);
  }

  // Adds the sums that the other CTA has stored here. After the last of a block the staging may have keys again.
  template <int kCount>
  __device__ __forceinline__ void take_over(float (&sums)[kCount], bool last) {
    // The last round's phase is over: this thread has waited for it, and the other CTA sends when it knows that.
    if (consumer.warp == 0 && consumer.lane == 0) {
      storage.received[kWho].arrive_and_expect(kCount * sizeof(float) * Config::kWarpgroup);
    }
    storage.received[kWho].wait(consumer.rounds.full(kReceived));
    consumer.rounds.advance(kReceived);
    add_staged(sums);
    if (last) {
      storage.free[0][1 + kWho].arrive();
    } else {
      arrive_at_other(storage.drained[kWho]);
    }
  }

  static constexpr uint32_t kReceived = 0, kDrained = 1;  // places among the phases

  // One arrival for the warp: none of its threads reads any more what the barrier stands for.
  __device__ __forceinline__ void arrive_at_other(Mbarrier& barrier) {
    __syncwarp();
    if (consumer.lane == 0) cluster_arrive_after_reads_at(cluster_address(smem_address(&barrier), 1 - cluster_rank()));
  }

  __device__ __forceinline__ uint32_t staging_address() const {
    return smem_address(storage.staging(kWho)) + (consumer.warp * 32 + consumer.lane) * 16;
  }

  template <int kCount>
  __device__ __forceinline__ void store_at_other(const float (&sums)[kCount]) {
    // Each store takes a pair of addresses without offsets. ptxas would keep them from round to round, and spill; a
    // volatile read is new each time.
    const uint32_t other = *static_cast<const volatile uint32_t*>(&storage.other);
    const uint32_t address = other + (staging_address() - smem_address(&storage));
    const uint32_t received = other + (smem_address(&storage.received[kWho]) - smem_address(&storage));
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      cluster_store_async_float4(address + i / 4 * Config::kWarpgroup * 16, sums[i], sums[i + 1], sums[i + 2],
                                 sums[i + 3], received);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_staged(float (&sums)[kCount]) {
    const float4* staged = reinterpret_cast<const float4*>(storage.staging(kWho)) + consumer.warp * 32 + consumer.lane;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 other = staged[i * Config::kWarpgroup];
      sums[4 * i] += other.x;
      sums[4 * i + 1] += other.y;
      sums[4 * i + 2] += other.z;
      sums[4 * i + 3] += other.w;
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
