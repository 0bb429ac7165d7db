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
  static constexpr int kHalfSums = kTileSums / 2;
  static constexpr int kHalfColumns = Config::kTileColumns / 2;
  static constexpr int kHalves = 2 * Config::kHalfTiles + (kHasKeyRope ? 2 : 0);  // of tiles of dKV
  // With which half scores of the next block are issued, as late as their products have room; past the last where they
  // are not.
  static constexpr int kAhead = ThisConsumer::kMultipliesAhead ? kHalves - 4 : kHalves;

  ThisConsumer& consumer;
  Storage<Config>& storage;
  EntryTargets<Config> targets;

  __device__ __forceinline__ Gradients(ThisConsumer& consumer, const EntryTargets<Config>& targets)
      : consumer(consumer), storage(consumer.storage), targets(targets) {}

  // `more`: whether there is another block.
  __device__ __forceinline__ void run(bool more) {
    static_assert(Config::kHalfTiles == 4);
    if constexpr (Config::kPacked && Config::kQueries > 1) {
      run_in_turn(more);
    } else {
      run_ahead(more);
    }
  }

  // The own columns of dKV by halves of tiles: while one is sent, the next is multiplied, and amid the first of them dQ.
  // L2 takes longest of all: so it has something to add as soon as half a tile is there, and never waits for a product.
  // A consumer with registers to spare multiplies its scores of the next block, too, whose keys have been asked for
  // since dQ was done.
  __device__ __forceinline__ void run_ahead(bool more) {
    float sums[2][kHalfSums];
    issue_half(sums[0], 0);
    issue_query_gradient();
    sm90::wgmma_wait<1>();
    sm90::warpgroup_fence_operand(sums[0]);
    issue_half(sums[1], 1);
    send_half(sums[0], 0);
    finish_query_gradient();
    take_halves<1, kAhead, false>(sums);
    if constexpr (kAhead < kHalves) {
      if (more) {
        consumer.wait_for_next_keys();
        take_halves<kAhead, kHalves, true>(sums);
      } else {
        take_halves<kAhead, kHalves, false>(sums);
      }
    }
  }

  // kScores: with scores of the next block, which take as long as two halves.
  template <int kBegin, int kEnd, bool kScores>
  __device__ __forceinline__ void take_halves(float (&sums)[2][kHalfSums]) {
#pragma unroll
    for (int half = kBegin; half < kEnd; ++half) {
      if (half + 1 < kHalves) issue_half(sums[(half + 1) % 2], half + 1);
      if (kScores && half == kBegin) {
        consumer.begin_scores();
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) consumer.issue_scores(part);
      }
      // All but what was issued last: the next half, and scores for as long as they may take.
      if (half + 1 == kHalves) {
        sm90::wgmma_wait<0>();
        storage.tiles_free.arrive();
      } else if (kScores && half < kBegin + 2) {
        sm90::wgmma_wait<1 + Config::kParts>();
      } else {
        sm90::wgmma_wait<1>();
      }
      if (kScores && half == kBegin + 2) sm90::warpgroup_fence_operand(consumer.scores);
      sm90::warpgroup_fence_operand(sums[half % 2]);
      send_half(sums[half % 2], half);
    }
  }

  // The half's first column of dKV.
  static __device__ __forceinline__ constexpr int32_t column_of(int half) {
    const bool is_value = half < 2 * Config::kHalfTiles;
    const int32_t first = is_value ? kWarpgroupIdx * Config::kHalfTiles * Config::kTileColumns : Config::kDV;
    return first + (is_value ? half : half - 2 * Config::kHalfTiles) * kHalfColumns;
  }

  // sums = dS^T Q (+ P^T dO) over half of a column tile of Q and dO; left in flight.
  __device__ __forceinline__ void issue_half(float (&sums)[kHalfSums], int half) {
    const int32_t column = column_of(half), tile = column / Config::kTileColumns;
    const uint32_t inside = column % Config::kTileColumns * sizeof(Element);
    issue_product<typename Atoms<Element>::KeyHalf>(sums, tile, inside, column < Config::kDV);
  }

  __device__ __forceinline__ void send_half(const float (&sums)[kHalfSums], int half) const {
    static_assert(kHalfColumns == EntryTargets<Config>::kLine);
    targets.send_line(sums, column_of(half), consumer.lane());
  }

  // The same where rows of packed queries are stored, which may have to be added to, for which there are branches: at
  // those ptxas would have all products waited for. So while one consumer packs, the other one's are multiplied. A
  // loop, so that instructions stay in their cache, but without the RoPE, where ptxas would spill.
  __device__ __forceinline__ void run_in_turn(bool more) {
    constexpr int kFirst = kWarpgroupIdx * Config::kHalfTiles;
    constexpr int kLast = kHasKeyRope ? kRopeTile : kFirst + Config::kHalfTiles - 1;
    issue_query_gradient();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
#pragma unroll
    for (Mbarrier& side : storage.free[0]) side.arrive();
    constexpr int kUnrolled = Config::kHasRope ? 1 : kLast - kFirst;
#pragma unroll kUnrolled
    for (int tile = kFirst; tile < kLast; ++tile) send(tile);
    float sums[kTileSums];
    issue_product<typename Atoms<Element>::Key>(sums, kLast, 0, !kHasKeyRope);
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

  __device__ __forceinline__ void send(int32_t tile) {
    float sums[kTileSums];
    issue_product<typename Atoms<Element>::Key>(sums, tile, 0, true);
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(sums);
    targets.send(sums, tile * Config::kTileColumns, consumer.lane());
  }

  // dQ += dS K, over the own columns; left in flight. The RoPE's columns are consumer 0's.
  __device__ __forceinline__ void issue_query_gradient() {
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      issue_wide(step);
      issue_narrow(step);
    }
    sm90::wgmma_commit();
  }

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

  // sums = dS^T Q (+ P^T dO) over columns of Q and dO, `inside` bytes behind the first of a tile; left in flight.
  template <typename Atom, int kCount>
  __device__ __forceinline__ void issue_product(float (&sums)[kCount], int32_t tile, uint32_t inside, bool has_values) {
    const auto columns = [&](const uint8_t (&of_tile)[Config::kTileBytes]) {
      return sm90::mn_major_descriptor(smem_address(of_tile) + inside, Config::kTileBytes);
    };
    const uint64_t ds = sm90::mn_major_descriptor(smem_address(storage.ds), Config::kTileBytes);
    const uint64_t q = columns(storage.q[tile]);
    sm90::warpgroup_fence_operand(sums);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<Atom>(sums, sm90::descriptor_advance(ds, step * kStepBytes),
                      sm90::descriptor_advance(q, step * kStepBytes), step == 0);
    }
    if (has_values) {
      const uint64_t p = sm90::mn_major_descriptor(smem_address(storage.p), Config::kTileBytes);
      const uint64_t dout = columns(storage.dout[tile]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm90::mma<Atom>(sums, sm90::descriptor_advance(p, step * kStepBytes),
                        sm90::descriptor_advance(dout, step * kStepBytes));
      }
    }
    sm90::wgmma_commit();
  }

  // The block's keys are done with.
  __device__ __forceinline__ void finish_query_gradient() {
    sm90::wgmma_wait<1>();
    sm90::warpgroup_fence_operand(consumer.dq_wide);
    sm90::warpgroup_fence_operand(consumer.dq_narrow);
#pragma unroll
    for (Mbarrier& side : storage.free[0]) side.arrive();
  }
};

}  // namespace cupymla::sparse_mla_bwd
