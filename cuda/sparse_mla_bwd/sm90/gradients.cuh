// The second half of a consumer's work on a block: its columns of dQ and of the block's dKV.
#pragma once

#include "../../common/cluster_exchange.cuh"
#include "consumer.cuh"

namespace cupymla::sparse_mla_bwd {

// Where sums of a block's dKV rows go: added to the token's row, or stored in the slot's own.
template <typename Config>
struct RowTargets {
  float* rows[2];  // of this thread's two slots; null where there is nothing to write
  bool add;        // in partials: whether an earlier pass has written them

  __device__ __forceinline__ RowTargets(const Parameters& params, const QueryPosition& query, int32_t first_slot,
                                        int32_t pass, int row, const int32_t (&slots)[2])
      : add(pass > 0) {
    const int64_t place = static_cast<int64_t>(query.batch) * params.s_q + query.query - params.query_begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* start = Config::kPartials
                         ? params.partials + (place * params.topk + first_slot + row + 8 * r) * Config::kDQk
                         : params.sums + query.batch * params.sums_batch + slots[r] * params.sums_token;
      rows[r] = slots[r] >= 0 ? start : nullptr;
    }
  }

  // Takes an accumulator of 64 slots x kColumns, whose first column is `column` of the row. Neighbouring lanes exchange
  // halves of every sixteen columns, so that each has four in a row of one slot.
  template <int kColumns>
  __device__ __forceinline__ void send(const float (&sums)[kColumns / 2], int32_t column, int lane) {
    const bool odd = (lane & 1) != 0;
    const int32_t lane_column = column + (odd ? 8 : 0) + (lane % 4 / 2) * 4;
#pragma unroll
    for (int pair = 0; pair < kColumns / 16; ++pair) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* left = sums + pair * 8 + 2 * r;
        const float* right = left + 4;
        const float x = __shfl_xor_sync(0xffffffffu, odd ? left[0] : right[0], 1);
        const float y = __shfl_xor_sync(0xffffffffu, odd ? left[1] : right[1], 1);
        const float four[4] = {odd ? x : left[0], odd ? y : left[1], odd ? right[0] : x, odd ? right[1] : y};
        if (rows[r] != nullptr) write(rows[r] + lane_column + pair * 16, four);
      }
    }
  }

  __device__ __forceinline__ void write(float* address, const float (&four)[4]) const {
    if (Config::kPartials && !add) {
      *reinterpret_cast<float4*>(address) = make_float4(four[0], four[1], four[2], four[3]);
    } else {
      // In partials the same thread has written the row before, so nothing is left to chance.
      reduce_add_float4(address, four);
    }
  }
};

template <typename Config, typename Element, int kWho>
struct Gradients {
  using ThisConsumer = Consumer<Config, Element, kWho>;
  static constexpr int kSteps = ThisConsumer::kSteps;
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;  // from sixteen rows of a tile to the next
  // The tile past the values: consumer 1 has its dKV, consumer 0 its dQ.
  static constexpr int kRopeTile = Config::kValueTiles;
  static constexpr bool kHasKeyRope = Config::kHasRope && kWho == 1;
  static constexpr int kTileSums = Config::kSlots * Config::kTileColumns / Config::kWarpgroup;

  ThisConsumer& consumer;
  Storage<Config>& storage;
  RowTargets<Config> targets;

  __device__ __forceinline__ Gradients(ThisConsumer& consumer, const RowTargets<Config>& targets)
      : consumer(consumer), storage(consumer.storage), targets(targets) {}

  __device__ __forceinline__ void run() {
    issue_query_gradient();
    constexpr int kFirst = kWho * Config::kHalfTiles;
    if constexpr (Config::kCluster == 1) {
      keep<true>(kFirst, true);
#pragma unroll
      for (int tile = kFirst + 1; tile < kFirst + Config::kHalfTiles; ++tile) keep<true>(tile, false);
      if constexpr (kHasKeyRope) keep<false>(kRopeTile, false);
    } else {
      static_assert(Config::kHalfTiles == 4);
      exchange(kFirst, true, false);
      exchange(kFirst + 2, false, !kHasKeyRope);
      if constexpr (kHasKeyRope) exchange_rope();
    }
    storage.tiles_free.arrive();
  }

  // dQ += dS K, over the own columns; left in flight.
  __device__ __forceinline__ void issue_query_gradient() {
    const uint64_t ds = sm90::k_major_descriptor(smem_address(storage.ds));
    const uint64_t k = sm90::mn_major_descriptor(smem_address(storage.k[0][kWho * Config::kHalfTiles]),
                                                 Config::kTileBytes);
    sm90::pin_registers(consumer.dq_wide);
    sm90::pin_registers(consumer.dq_narrow);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<typename Atoms<Element>::QueryWide>(consumer.dq_wide, sm90::descriptor_advance(ds, step * 32),
                                                    sm90::descriptor_advance(k, step * kStepBytes));
    }
    if constexpr (ThisConsumer::kHasNarrow) {
      const uint64_t rope = sm90::mn_major_descriptor(smem_address(storage.k[0][kRopeTile]), Config::kTileBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm90::mma<typename Atoms<Element>::QueryNarrow>(consumer.dq_narrow, sm90::descriptor_advance(ds, step * 32),
                                                        sm90::descriptor_advance(rope, step * kStepBytes));
      }
    }
    sm90::wgmma_commit();
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

  // Waits for the products. With the first of a block dQ is done too, hence the block's keys.
  __device__ __forceinline__ void finish(float (&sums)[kTileSums], bool first) {
    if (first) {
      sm90::wgmma_wait<1>();
      sm90::pin_registers(consumer.dq_wide);
      sm90::pin_registers(consumer.dq_narrow);
      release_keys();
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(sums);
  }

  __device__ __forceinline__ void release_keys() {
    storage.free[0][0].arrive();
    // Of two CTAs each consumer still needs the staging that is its own.
    if constexpr (Config::kCluster == 1 || kWho == 1) storage.free[0][1].arrive();
    if constexpr (Config::kCluster == 1 || kWho == 0) storage.free[0][2].arrive();
    if constexpr (Config::kCluster > 1) arrive_at_other(storage.staging_ready);
  }

  // One CTA to a query: a tile of dKV goes straight to global memory.
  template <bool kValues>
  __device__ __forceinline__ void keep(int32_t tile, bool first) {
    float sums[kTileSums];
    issue_key_gradient<kValues>(sums, tile);
    finish(sums, first);
    targets.template send<Config::kTileColumns>(sums, tile * Config::kTileColumns, consumer.lane);
  }

  // Two CTAs to a query, and two tiles: the first CTA finishes the left one, the second the other. Each computes the
  // other's first and hands it over, then its own, to which it adds what it is handed.
  __device__ __forceinline__ void exchange(int32_t left_tile, bool first, bool last) {
    const int32_t rank = static_cast<int32_t>(cluster_rank());
    float sums[kTileSums];
    issue_key_gradient<true>(sums, left_tile + 1 - rank);
    finish(sums, first);
    hand_over(sums, first);
    issue_key_gradient<true>(sums, left_tile + rank);
    finish(sums, false);
    take_over(sums, last);
    targets.template send<Config::kTileColumns>(sums, (left_tile + rank) * Config::kTileColumns, consumer.lane);
  }

  // The RoPE tile has no partner: each CTA finishes half of its columns.
  __device__ __forceinline__ void exchange_rope() {
    const int32_t rank = static_cast<int32_t>(cluster_rank());
    float sums[kTileSums];
    issue_key_gradient<false>(sums, kRopeTile);
    finish(sums, false);
    float half[kTileSums / 2];
#pragma unroll
    for (int i = 0; i < kTileSums / 2; ++i) half[i] = rank == 0 ? sums[i + kTileSums / 2] : sums[i];
    hand_over(half, false);
#pragma unroll
    for (int i = 0; i < kTileSums / 2; ++i) half[i] = rank == 0 ? sums[i] : sums[i + kTileSums / 2];
    take_over(half, true);
    constexpr int kColumns = Config::kTileColumns / 2;
    targets.template send<kColumns>(half, Config::kDV + rank * kColumns, consumer.lane);
  }

  // Stores sums in the other CTA's staging, once there is room. Consumer 1 begins: so one consumer sends to the other
  // CTA while the other one multiplies, or sends to L2.
  template <int kCount>
  __device__ __forceinline__ void hand_over(const float (&sums)[kCount], bool first) {
    if (first) {
      storage.staging_ready.wait(consumer.k_parity);
      if constexpr (kWho == 0) storage.first_sent.wait(consumer.k_parity);
    } else {
      storage.drained[kWho].wait(consumer.rounds.full(kDrained));
      consumer.rounds.advance(kDrained);
    }
    store_at_other(sums);
    if (kWho == 1 && first) storage.first_sent.arrive();
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
