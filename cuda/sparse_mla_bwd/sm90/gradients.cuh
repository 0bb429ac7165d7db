// The second half of a consumer's work on a block: its columns of dQ and of the block's dKV.
#pragma once

#include "consumer.cuh"
#include "packed_entry_targets.cuh"
#include "row_targets.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config>
using EntryTargets = conditional_t<Config::kPacked, PackedEntryTargets<Config>, RowTargets<Config>>;

template <typename Config, typename Element, int kWarpgroupIdx>
struct Gradients {
  using ThisConsumer = Consumer<Config, Element, kWarpgroupIdx>;
  static constexpr int kSteps = ThisConsumer::kSteps;
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;  // from sixteen rows of a tile to the next
  // The tile past the values: one consumer has its dKV, the other its dQ.
  static constexpr int kRopeTile = Config::kValueTiles;
  static constexpr bool kHasKeyRope = Config::kHasRope && !ThisConsumer::kHasNarrow;
  static constexpr int kTileSums = Config::kTileKeys * Config::kTileColumns / Config::kWarpgroup;

  ThisConsumer& consumer;
  Storage<Config>& storage;
  EntryTargets<Config> targets;

  __device__ __forceinline__ Gradients(ThisConsumer& consumer, const EntryTargets<Config>& targets)
      : consumer(consumer), storage(consumer.storage), targets(targets) {}

  // `more`: whether there is another block.
  __device__ __forceinline__ void run(bool more) {
    constexpr int kFirst = kWarpgroupIdx * Config::kHalfTiles;
    static_assert(Config::kHalfTiles == 4);
    constexpr int kLast = kHasKeyRope ? kRopeTile : kFirst + Config::kHalfTiles - 1;
    if constexpr (Config::kPacked && Config::kQueries > 1) {
      run_in_turn<kFirst, kLast>(more);
    } else {
      send_first(kFirst);
      send(kFirst + 1, true);
      send_and_multiply_ahead(kFirst + 2, more);
      if constexpr (kHasKeyRope) send(kFirst + 3, false);
      send_last<!kHasKeyRope>(kLast);
    }
  }

  // The same where rows of packed queries are stored, which may have to be added to, for which there are branches: at
  // those ptxas would have all products waited for. So while one consumer packs, the other one's are multiplied. A
  // loop, so that instructions stay in their cache, but without the RoPE, where ptxas would spill.
  template <int kFirst, int kLast>
  __device__ __forceinline__ void run_in_turn(bool more) {
    begin_query_gradient();
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      issue_wide(step);
      issue_narrow(step);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
#pragma unroll
    for (Mbarrier& side : storage.free[0]) side.arrive();
    constexpr int kUnrolled = Config::kHasRope ? 1 : kLast - kFirst;
#pragma unroll kUnrolled
    for (int tile = kFirst; tile < kLast; ++tile) send(tile, false);
    float sums[kTileSums];
    issue_key_gradient<!kHasKeyRope>(sums, kLast);
    // Behind it the scores of the next block. Their keys have been asked for since dQ was done.
    bool ahead = false;
    if constexpr (ThisConsumer::kMultipliesAhead) {
      ahead = more;
      if (more) {
        consumer.wait_for_next_keys();
        consumer.begin_scores();
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) consumer.issue_scores(part);
        sm90::wgmma_wait<Config::kParts>();
        storage.tiles_free.arrive();
        consumer.finish_scores();
      }
    }
    if (!ahead) {
      sm90::wgmma_wait<0>();
      storage.tiles_free.arrive();
    }
    sm90::warpgroup_fence_operand(sums);
    targets.send(sums, kLast * Config::kTileColumns, consumer.lane());
  }

  __device__ __forceinline__ void begin_query_gradient() {
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
  }

  // dQ += dS K, over the own columns and sixteen entries; left in flight. The RoPE's columns are consumer 0's.
  __device__ __forceinline__ void issue_wide(int step) {
    const uint64_t k = sm90::mn_major_descriptor(smem_address(storage.k[0][kWarpgroupIdx * Config::kHalfTiles]),
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

  // sums = dS^T Q (+ P^T dO) over a column tile of Q and dO; left in flight.
  template <bool kValues>
  __device__ __forceinline__ void issue_key_gradient(float (&sums)[kTileSums], uint32_t tile) {
    const uint64_t ds = sm90::mn_major_descriptor(smem_address(storage.ds), Config::kTileBytes);
    const uint64_t q = sm90::mn_major_descriptor(smem_address(storage.q[tile]), Config::kTileBytes);
    sm90::warpgroup_fence_operand(sums);
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
    if (after_query_gradient) finish_query_gradient();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(sums);
  }

  // The products of one tile, issued after dQ's, may be unfinished.
  __device__ __forceinline__ void finish_query_gradient() {
    sm90::wgmma_wait<1>();
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
#pragma unroll
    for (Mbarrier& side : storage.free[0]) side.arrive();
  }

  // Sends a tile of dKV, the first of a block, while dQ is multiplied. So L2, which takes longest of all, has something
  // to add again as soon as one product is done.
  __device__ __forceinline__ void send_first(int32_t tile) {
    static_assert(kSteps == 2 * (Config::kTileColumns / RowTargets<Config>::kLine));
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, false);
    begin_query_gradient();
    const auto places = targets.places(consumer.lane());
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::wgmma_fence();
      issue_wide(step);
      issue_narrow(step);
      sm90::wgmma_commit();
      if (step % 2 != 0) targets.send_line(sums, places, step / 2, tile * Config::kTileColumns, consumer.lane());
    }
  }

  __device__ __forceinline__ void send(int32_t tile, bool after_query_gradient) {
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, after_query_gradient);
    targets.send(sums, tile * Config::kTileColumns, consumer.lane());
  }

  // While this one goes, for which L2 takes its time, a consumer with registers to spare multiplies its scores of the
  // next block. Their keys have been asked for since dQ was done.
  __device__ __forceinline__ void send_and_multiply_ahead(int32_t tile, bool more) {
    float sums[kTileSums];
    issue_key_gradient<true>(sums, tile);
    finish(sums, false);
    if constexpr (ThisConsumer::kMultipliesAhead) {
      if (more) {
        consumer.wait_for_next_keys();
        consumer.begin_scores();
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) consumer.issue_scores(part);
        targets.send(sums, tile * Config::kTileColumns, consumer.lane());
        consumer.finish_scores();
        return;
      }
    }
    targets.send(sums, tile * Config::kTileColumns, consumer.lane());
  }

  template <bool kValues>
  __device__ __forceinline__ void send_last(int32_t tile) {
    float sums[kTileSums];
    issue_key_gradient<kValues>(sums, tile);
    finish(sums, false);
    storage.tiles_free.arrive();
    targets.send(sums, tile * Config::kTileColumns, consumer.lane());
  }
};

}  // namespace cupymla::sparse_mla_bwd
