// The attention's second half: dQ and dKV from P and dS, 192 columns of a query to a CTA, in clusters of one query.
#pragma once

#include "../../common/bulk_copy.cuh"
#include "../../common/cluster.cuh"
#include "../../common/cluster_delivery.cuh"
#include "../../common/cluster_exchange.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/math.cuh"
#include "../../common/opaque.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/stream_copy.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/tma.cuh"
#include "../params.cuh"
#include "gradient_storage.cuh"
#include "head_columns.cuh"
#include "row_copies.cuh"
#include "row_targets.cuh"
#include "stored_scores.cuh"

#ifndef CUPYMLA_CLUSTERED
#define CUPYMLA_CLUSTERED 0
#endif
#ifndef CUPYMLA_LINES
#define CUPYMLA_LINES 1
#endif

namespace cupymla::sparse_mla_bwd {

// The wgmma shapes. Query: dQ, heads x columns. Side, Middle: dKV, slots x columns, where both operands are read across
// their rows.
template <typename Element>
struct GradientAtoms;

template <>
struct GradientAtoms<__nv_bfloat16> {
  using Query = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<sm90::Major::K, sm90::Major::MN>;
  using QueryOfSides = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<sm90::Major::K, sm90::Major::MN>;
  using Side = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<sm90::Major::MN, sm90::Major::MN>;
  using Middle = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<sm90::Major::MN, sm90::Major::MN>;
};

template <>
struct GradientAtoms<__half> {
  using Query = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<sm90::Major::K, sm90::Major::MN>;
  using QueryOfSides = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<sm90::Major::K, sm90::Major::MN>;
  using Side = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<sm90::Major::MN, sm90::Major::MN>;
  using Middle = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<sm90::Major::MN, sm90::Major::MN>;
};

template <typename Config>
__device__ __forceinline__ void init_barriers(GradientStorage<Config>& storage) {
  storage.heads_full.init(1);
  storage.heads_ready.init(Config::kConsumerThreads);
  storage.heads_free.init(Config::kConsumerThreads);
  storage.slots_in.init(1);
  for (int set = 0; set < Config::kSets; ++set) {
    storage.full[set].init(1 + Config::kWarpgroup + 4);
    storage.free[set].init(Config::kConsumerThreads);
    storage.scores_free[set].init(Config::kShares * Config::kConsumerThreads / 32);
  }
  fence_mbarrier_init();
}

// Which columns of which query a CTA has. `index` counts the clusters.
template <typename Config>
struct Share {
  uint32_t token;
  int32_t first;  // column tile

  __device__ __forceinline__ Share(const Parameters& params, uint32_t index)
      : token(params.query_begin + index), first(static_cast<int32_t>(blockIdx.x % Config::kShares) * Config::kTiles) {}

  __device__ __forceinline__ uint32_t rank() const { return first / Config::kTiles; }
  __device__ __forceinline__ bool is_last() const { return first + Config::kTiles >= Config::kKeyTiles; }
};

#if CUPYMLA_LINES
template <typename Config>
struct LineTargets {
  float* rows[2][2];  // of the even and the odd slot of this thread's pair; of those eight behind them
  bool add;

  LineTargets() = default;
  __device__ __forceinline__ LineTargets(const Parameters& params, const QueryPosition& query, int32_t first_slot,
                                         int32_t pass, int row, const int32_t* tokens)
      : add(pass > 0) {
    const int64_t place = static_cast<int64_t>(query.batch) * params.s_q + query.query - params.query_begin;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int slot = (row & ~1) + odd + 8 * r;
        const int32_t token = tokens[slot];
        float* start = Config::kPartials ? params.partials + (place * params.topk + first_slot + slot) * Config::kDQk
                                         : params.sums + query.batch * params.sums_batch + token * params.sums_token;
        rows[odd][r] = token >= 0 ? start : nullptr;
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void send_ordered(const float (&sums)[kCount], int32_t column, int lane) const {
    float s[kCount];
    const bool odd_row = (lane & 4) != 0;
#pragma unroll
    for (int pair = 0; pair < kCount / 16; ++pair) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float left = sums[pair * 16 + i], right = sums[pair * 16 + 8 + i];
        const float got = __shfl_xor_sync(0xffffffffu, odd_row ? left : right, 4);
        s[pair * 16 + i] = odd_row ? got : left;
        s[pair * 16 + 8 + i] = odd_row ? right : got;
      }
    }
    const int32_t here = column + (lane & 4) * 4 + lane % 4 * 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows[row][r] == nullptr) continue;
        float* start = rows[row][r] + here;
#pragma unroll
        for (int pair = 0; pair < kCount / 16; ++pair) {
          const float* t = s + pair * 16 + row * 8 + r * 2;
          const float four[4] = {t[0], t[1], t[4], t[5]};
          if (Config::kPartials && !add) {
            *reinterpret_cast<float4*>(start + pair * 32) = make_float4(four[0], four[1], four[2], four[3]);
          } else {
            reduce_add_float4(start + pair * 32, four);
          }
        }
      }
    }
  }
};
#define RowTargets LineTargets
#endif

// kLast: of the CTA that has the last columns, whose middle is the RoPE's tile or none.
template <typename Config, typename Element, int kWho, bool kLast>
struct GradientConsumer {
  using Atoms = GradientAtoms<Element>;
  static constexpr int kSteps = Config::kSlots / 16;               // wgmma k steps over 64 slots, or 64 heads
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;    // from sixteen rows of a tile to the next
  static constexpr int kQuery = Config::kHeads * Config::kTiles * Config::kTileColumns / Config::kWarpgroup;
  static constexpr int kSide = Config::kSlots * Config::kTileColumns / Config::kWarpgroup;
  static constexpr int kMiddle = kSide / 2;
  static constexpr uint32_t kMiddleOffset = kWho * kSwizzleRowBytes / 2;  // of the own half in rows of the middle
  static constexpr int kMiddleColumn = Config::kMiddle * Config::kTileColumns + kWho * Config::kTileColumns / 2;

  static constexpr bool kHasMiddle = Config::tiles(kLast) == Config::kTiles;
  static constexpr bool kMiddleHasValues = !kLast;

  GradientStorage<Config>& storage;
  const Parameters& params;
  const Share<Config> share;
  const int warp;
  const int lane;
  const int row;  // this thread's accumulator rows are `row` and `row + 8`

  float dq[kQuery];  // of the own 64 heads
  uint32_t set = 0, parity = 0;

  __device__ __forceinline__ GradientConsumer(GradientStorage<Config>& storage, const Parameters& params,
                                              const Share<Config>& share)
      : storage(storage),
        params(params),
        share(share),
        warp((threadIdx.x / 32) % 4),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ const uint8_t* score_tile(int group, int which) const {
    return storage.scores[set][group][which];
  }

  // dQ += dS K.
  __device__ __forceinline__ void issue_query() {
    if constexpr (kHasMiddle) {
      issue_query_columns<typename Atoms::Query>(dq);
    } else {
      issue_query_columns<typename Atoms::QueryOfSides>(reinterpret_cast<float(&)[kQuery / 3 * 2]>(dq));
    }
  }

  template <typename Atom, int kCount>
  __device__ __forceinline__ void issue_query_columns(float (&sums)[kCount]) {
    const uint64_t ds = sm90::k_major_descriptor(smem_address(score_tile(kWho, 1)));
    const uint64_t k = sm90::mn_major_descriptor(smem_address(storage.k[set][0]), Config::kTileBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<Atom>(sums, sm90::descriptor_advance(ds, step * 32), sm90::descriptor_advance(k, step * kStepBytes));
    }
  }

  // sums (+)= tile^T heads, over all groups: of dS and Q, or of P and dO.
  template <typename Atom, int kCount>
  __device__ __forceinline__ void issue_keys(float (&sums)[kCount], int which, const uint8_t* heads, uint32_t offset,
                                             bool clear) {
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) {
      const uint64_t a = sm90::mn_major_descriptor(smem_address(score_tile(group, which)), Config::kTileBytes);
      const uint64_t b = sm90::mn_major_descriptor(
          smem_address(heads) + group * Config::kTiles * Config::kTileBytes + offset, Config::kTileBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm90::mma<Atom>(sums, sm90::descriptor_advance(a, step * kStepBytes),
                        sm90::descriptor_advance(b, step * kStepBytes), clear && group == 0 && step == 0);
      }
    }
  }

  __device__ __forceinline__ void issue_first(float (&side)[kSide]) {
    sm90::pin_registers(dq);
    sm90::pin_registers(side);
    sm90::wgmma_fence();
    issue_query();
    issue_keys<typename Atoms::Side>(side, 1, storage.q[0][kWho], 0, true);
    issue_keys<typename Atoms::Side>(side, 0, storage.dout[0][kWho], 0, false);
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void finish_first(float (&side)[kSide]) {
    sm90::wgmma_wait<0>();
    sm90::pin_registers(dq);
    sm90::pin_registers(side);
  }

  __device__ __forceinline__ void issue_middle(float (&middle)[kMiddle]) {
    if constexpr (!kHasMiddle) return;
    sm90::pin_registers(middle);
    sm90::wgmma_fence();
    issue_keys<typename Atoms::Middle>(middle, 1, storage.q[0][Config::kMiddle], kMiddleOffset, true);
    if constexpr (kMiddleHasValues) {
      issue_keys<typename Atoms::Middle>(middle, 0, storage.dout[0][Config::kMiddle], kMiddleOffset, false);
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void finish_middle(float (&middle)[kMiddle]) {
    if constexpr (!kHasMiddle) return;
    sm90::wgmma_wait<0>();
    sm90::pin_registers(middle);
  }

  __device__ __forceinline__ void send_side(const float (&side)[kSide], const RowTargets<Config>& targets) {
    targets.send_ordered(side, (share.first + kWho) * Config::kTileColumns, lane);
  }

  __device__ __forceinline__ void send_middle(const float (&middle)[kMiddle], const RowTargets<Config>& targets) {
    if constexpr (kHasMiddle) {
      targets.send_ordered(middle, share.first * Config::kTileColumns + kMiddleColumn, lane);
    }
  }

  // The slots that this thread's rows of dKV stand for.
  __device__ __forceinline__ RowTargets<Config> read_targets(const QueryPosition& query, int32_t first_slot,
                                                             int32_t pass) const {
#if CUPYMLA_LINES
    return RowTargets<Config>(params, query, first_slot, pass, row, storage.tokens[set]);
#endif
    const int32_t slots[2] = {storage.tokens[set][row], storage.tokens[set][row + 8]};
#if !CUPYMLA_LINES
    return RowTargets<Config>(params, query, first_slot, pass, row, slots);
#endif
  }

  // Nothing reads the block any more. `again`: whether its set will have another one, whose P and dS come from all CTAs.
  __device__ __forceinline__ void let_go(bool again) {
    storage.free[set].arrive();
    __syncwarp();
    if (CUPYMLA_CLUSTERED && again && lane < Config::kShares) {
      cluster_arrive_after_reads_at(cluster_address(smem_address(&storage.scores_free[set]), lane));
    }
  }

  __device__ __forceinline__ void next_set() {
    set ^= 1u;
    if (set == 0) parity ^= 1u;
  }

  __device__ __forceinline__ void store_query_gradient(const QueryPosition& query, int32_t first_head) const {
    uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
#pragma unroll
    for (int part = 0; part < Config::kTiles * 2; ++part) {
      if (part / 2 == Config::kMiddle && !kHasMiddle) continue;
      store_head_columns<Element>(start, first_head + row, params.h_q, params.dq_head_bytes,
                                  share.first * Config::kTileColumns + part * 32, dq + part * 16, lane);
    }
  }
};


// Puts the columns of Q and dO in the order in which a product is to leave sums of dKV with threads: of every sixteen a
// thread gets four pairs' worth, two and two, which are neighbours then. So each of 256 threads has 32 bytes of a row.
template <typename Config>
__device__ __forceinline__ void order_columns(uint8_t* tiles, int count) {
  constexpr int kTileGroups = Config::kHeads * Config::kTileColumns / 16;
  for (int i = threadIdx.x; i < count * kTileGroups; i += Config::kConsumerThreads) {
    uint8_t* tile = tiles + i / kTileGroups * Config::kTileBytes;
    const int row = i % kTileGroups / 4, chunk = i % 4 * 2;
    uint4& left = *reinterpret_cast<uint4*>(tile + swizzle_128(row, chunk));
    uint4& right = *reinterpret_cast<uint4*>(tile + swizzle_128(row, chunk + 1));
    const uint4 x = left, y = right;
    left = uint4{x.x, x.z, y.x, y.z};
    right = uint4{x.y, x.w, y.y, y.w};
  }
}

template <typename Config, typename Element, int kWho, bool kLast>
__device__ __forceinline__ void consume(GradientConsumer<Config, Element, kWho, kLast>& consumer,
                                        const SparseQuery<Config::kSlots>& query, int32_t pass) {
  auto& storage = consumer.storage;
#pragma unroll
  for (float& sum : consumer.dq) sum = 0.f;
  storage.heads_full.wait(static_cast<uint32_t>(pass) & 1u);
#pragma unroll
  for (int group = 0; group < Config::kGroups; ++group) {
    order_columns<Config>(storage.q[group][0], Config::tiles(kLast));
    order_columns<Config>(storage.dout[group][0], Config::tiles(kLast));
  }
  fence_async_shared();
  storage.heads_ready.arrive();
  storage.heads_ready.wait(static_cast<uint32_t>(pass) & 1u);
  using ThisConsumer = GradientConsumer<Config, Element, kWho, kLast>;
  // Nothing goes there: the first block has none before it, whose middle it would send.
  RowTargets<Config> last{};
  float middle[ThisConsumer::kMiddle] = {};
  for (int32_t block = 0; block < query.blocks; ++block) {
    storage.full[consumer.set].wait(consumer.parity);
    fence_async_shared();
    // Sums have arrays of their own in each block, or ptxas moves them about.
    float side[ThisConsumer::kSide], next_middle[ThisConsumer::kMiddle];
    consumer.issue_first(side);
    consumer.send_middle(middle, last);
    last = consumer.read_targets(query, block * Config::kSlots, pass);
    consumer.finish_first(side);
    consumer.issue_middle(next_middle);
    consumer.send_side(side, last);
    consumer.finish_middle(next_middle);
    consumer.let_go(block + Config::kSets < query.blocks || pass + 1 < consumer.params.passes);
    consumer.next_set();
#pragma unroll
    for (int i = 0; i < ThisConsumer::kMiddle; ++i) middle[i] = next_middle[i];
  }
  storage.heads_free.arrive();
  consumer.send_middle(middle, last);
  consumer.store_query_gradient(query, (pass * Config::kGroups + kWho) * Config::kHeads);
}

template <typename Config>
__device__ __forceinline__ void produce(GradientStorage<Config>& storage, const Parameters& params,
                                        const SparseQuery<Config::kSlots>& query, const Share<Config>& share,
                                        const TensorMap& q_map, const TensorMap& dout_map) {
  const int warp = (threadIdx.x / 32) % 4;
  const uint32_t lane = threadIdx.x % 32;
  const bool first_lane = warp == 0 && lane == 0;
  const uint64_t l2_policy = l2_policy_evict_last();
  const uint64_t once_policy = l2_policy_evict_first();
  const uint8_t* columns =
      params.kv + query.batch * params.kv_batch_bytes + share.first * static_cast<int>(kSwizzleRowBytes);
  const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
  const int tiles = Config::tiles(share.is_last());
  uint32_t set = 0, parity = 1;

  // An ordinary load: in the place of indices there may be lists that a kernel of the call has written.
  const auto load_token = [&](int32_t number) {
    const int32_t slot = number * Config::kSlots + warp * RowCopies::kWarpSlots + lane % RowCopies::kWarpSlots;
    return slot < query.slots ? indices[slot] : -1;
  };

  for (int32_t pass = 0; pass < params.passes; ++pass) {
    if (first_lane) {
      storage.heads_free.wait(static_cast<uint32_t>(pass) & 1u ^ 1u);
      storage.heads_full.arrive_and_expect(2 * Config::kGroups * tiles * Config::kTileBytes);
      for (int group = 0; group < Config::kGroups; ++group) {
        const int32_t head = (pass * Config::kGroups + group) * Config::kHeads;
        for (int tile = 0; tile < tiles; ++tile) {
          const int32_t column = (share.first + tile) * Config::kTileColumns;
          tma_load_4d(storage.q[group][tile], q_map, storage.heads_full, column, head, query.query, query.batch);
          // Zeros past the values.
          tma_load_4d(storage.dout[group][tile], dout_map, storage.heads_full, column, head, query.query, query.batch);
        }
      }
    }
    __syncwarp();
    int32_t token = load_token(0);
    for (int32_t block = 0; block < query.blocks; ++block) {
      const int32_t next_token = load_token(block + 1);
      const RowCopies rows(token, query.token_limit, columns, params.kv_token_bytes, warp, lane);
      storage.free[set].wait(parity);
      if (lane < RowCopies::kWarpSlots) {
        storage.tokens[set][warp * RowCopies::kWarpSlots + lane] = (rows.valid >> lane & 1u) != 0 ? token : -1;
      }
      __syncwarp();
      if (lane == 0) storage.full[set].arrive();
      if (first_lane) {
        storage.full[set].arrive_and_expect(sizeof(storage.scores[set]));
#if CUPYMLA_CLUSTERED
        // A third of P and dS to all CTAs of the query; the other thirds come from them.
        storage.scores_free[set].wait(parity);
        const uint32_t begin = share.rank() * Config::kPieceBytes;
        const uint32_t bytes = min(Config::kPieceBytes, Config::kScoreBytes - begin);
        bulk_load_to_cluster(storage.scores[set][0][0] + begin, stored_scores(params, query, pass, block) + begin, bytes,
                             storage.full[set], (1u << Config::kShares) - 1, once_policy);
#else
        bulk_load(storage.scores[set], stored_scores(params, query, pass, block), sizeof(storage.scores[set]),
                  storage.full[set]);
#endif
      }
      __syncwarp();
      rows.copy<Config::kTileBytes>(smem_address(storage.k[set][0]), 0, tiles, l2_policy);
      storage.full[set].arrive_after_copies();
      set ^= 1u;
      if (set == 0) parity ^= 1u;
      token = next_token;
    }
  }
}

template <typename Config, typename Element, int kWho, bool kLast>
__device__ __forceinline__ void consume_passes(GradientStorage<Config>& storage, const Parameters& params,
                                               const SparseQuery<Config::kSlots>& query, const Share<Config>& share) {
  GradientConsumer<Config, Element, kWho, kLast> consumer(storage, params, share);
  for (int32_t pass = 0; pass < params.passes; ++pass) consume(consumer, query, pass);
}

template <typename Config, typename Element, bool kLast>
__device__ __forceinline__ void consume_passes_as(int warpgroup, GradientStorage<Config>& storage,
                                                  const Parameters& params, const SparseQuery<Config::kSlots>& query,
                                                  const Share<Config>& share) {
  if (warpgroup == 0) {
    consume_passes<Config, Element, 0, kLast>(storage, params, query, share);
  } else {
    consume_passes<Config, Element, 1, kLast>(storage, params, query, share);
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void gradients(GradientStorage<Config>& storage, const Parameters& params, uint32_t index,
                                          const TensorMap& q_map, const TensorMap& dout_map) {
  const Share<Config> share(params, index);
  const uint32_t token = share.token;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    init_barriers(storage);
    if (CUPYMLA_CLUSTERED && share.rank() != 0) storage.slots_in.arrive_and_expect(sizeof(storage.slots));
  }
  wait_for_grid_ahead(params.followed != 0);
  // One thread reads how many slots there are: all must wait for the same blocks, whoever writes to topk_length.
  if (threadIdx.x == 0 && (!CUPYMLA_CLUSTERED || share.rank() == 0)) {
    storage.slots = SparseQuery<Config::kSlots>::read_slots(params, QueryPosition(params, token));
  }
  __syncthreads();
#if CUPYMLA_CLUSTERED
  cluster_arrive();
  cluster_wait();
  if (share.rank() != 0) {
    storage.slots_in.wait(0);
  } else if (threadIdx.x > 0 && threadIdx.x < Config::kShares) {
    cluster_store_async_int32(cluster_address(smem_address(&storage.slots), threadIdx.x), storage.slots,
                              cluster_address(smem_address(&storage.slots_in), threadIdx.x));
  }
#endif
  const SparseQuery<Config::kSlots> query(params, token, storage.slots);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == 2) {
    registers_give_back<Config::kProducerRegisters>();
    produce(storage, params, query, share, q_map, dout_map);
  } else {
    registers_take<Config::kConsumerRegisters>();
    if (share.is_last()) {
      consume_passes_as<Config, Element, true>(warpgroup, storage, params, query, share);
    } else {
      consume_passes_as<Config, Element, false>(warpgroup, storage, params, query, share);
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
