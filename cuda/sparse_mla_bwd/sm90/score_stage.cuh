// The attention's first half: P and dS of all slots of a query, 64 heads to a CTA, to where the second half reads them.
#pragma once

#include "../../common/bulk_copy.cuh"
#include "../../common/dot.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/log2_lse.cuh"
#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/reduction.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/stream_copy.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/tma.cuh"
#include "../../common/tma_store.cuh"
#include "../params.cuh"
#include "../sink.cuh"
#include "row_copies.cuh"
#include "score_storage.cuh"
#include "score_tiles.cuh"
#include "stored_scores.cuh"

#ifndef CUPYMLA_TURNS
#define CUPYMLA_TURNS 1
#endif
#ifndef CUPYMLA_AHEAD
#define CUPYMLA_AHEAD 0
#endif

namespace cupymla::sparse_mla_bwd {

constexpr uint32_t kScoreDistribution = 1, kScoresOut = 2;  // named barriers

// Which groups of which query's heads a CTA takes, one after the other. Of more than two groups one CTA takes all, so
// that the order in which they add to the distribution is fixed. `index` counts these CTAs.
struct ScoreGroups {
  int32_t first, end, step;
  uint32_t token;

  __device__ __forceinline__ ScoreGroups(const Parameters& params, uint32_t index)
      : first(static_cast<int32_t>(index % params.score_ctas)),
        end(params.passes * kPassGroups),
        step(static_cast<int32_t>(params.score_ctas)),
        token(params.score_begin + index / params.score_ctas) {}
};

template <typename Config>
__device__ __forceinline__ void init_barriers(ScoreStorage<Config>& storage) {
  constexpr uint32_t kEveryConsumer = Config::kConsumerThreads;
  storage.heads_full.init(1);
  storage.heads_read.init(kEveryConsumer);
  storage.heads_free.init(kEveryConsumer);
  storage.statistics_out.init(kEveryConsumer);
  for (int place = 0; place < Config::kPlaces; ++place) {
    storage.full[place].init(Config::kWarpgroup + 4);
    storage.free[place].init(kEveryConsumer);
  }
  for (int set = 0; set < Config::kSets; ++set) {
    storage.turn[set].init(Config::kWarpgroup);
    storage.tiles_free[set].init(1);
    for (Mbarrier& half : storage.p_ready[set]) half.init(Config::kWarpgroup);
  }
  fence_mbarrier_init();
}

__device__ __forceinline__ void make_opaque(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}

// Four consumer threads to a head, each with every fourth 16 bytes of its channels. What the forward gave is asked for
// before dO has come.
template <typename Config, typename Element>
__device__ __forceinline__ void make_statistics(ScoreStorage<Config>& storage, const Parameters& params,
                                                const QueryPosition& query, int32_t first_head, uint32_t parity) {
  constexpr int kChunks = Config::kDV / 8 / 4;
  constexpr int kBatch = kChunks / 2;  // as many as there are registers for
  const int row = threadIdx.x / 4;
  const int quad_lane = threadIdx.x % 4;
  const int32_t head = first_head + row;
  const int64_t batch = query.batch, token = query.query;
  const bool there = head < params.h_q;
  const uint8_t* line = params.out + batch * params.out_batch_bytes + token * params.out_query_bytes +
                        (there ? head : 0) * params.out_head_bytes;
  const auto load = [&](int i) { return __ldg(reinterpret_cast<const uint4*>(line) + i * 4 + quad_lane); };
  uint4 out[kBatch];
  float given = 0.f;
  if (there) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) out[i] = load(i);
    given = read_lse(params, query, head);
  }
  storage.heads_full.wait(parity);
  Log2Lse lse{positive_infinity(), 1.f};
  float delta = 0.f, share = 1.f;
  if (there) {
#pragma unroll
    for (int batch = 0; batch < 2; ++batch) {
      if (batch > 0) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) out[i] = load(kBatch + i);
        // All are asked for before any is needed.
#pragma unroll
        for (int i = 0; i < kBatch; ++i) make_opaque(out[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int chunk = (batch * kBatch + i) * 4 + quad_lane;
        const uint4 right = *reinterpret_cast<const uint4*>(storage.dout(chunk / 8) + swizzle_128(row, chunk % 8));
        delta += dot_eight<Element>(out[i], right);
      }
    }
    lse = log2_lse(given, params.unit, params.unit_rest);
    share = share_beside_sink(params, head, given);
  }
  delta = quad_sum(delta);
  if (quad_lane == 0) {
    storage.lse[row] = lse.rounded;
    storage.factor[row] = lse.factor;
    storage.share[row] = share * lse.factor;
    storage.delta[row] = delta;
  }
}

template <typename Config, typename Element, int kWho>
struct ScoreConsumer {
  static constexpr int kTiles = kWho == 0 ? Config::kKeyTiles : Config::kValueTiles;
  static constexpr int kScores = Config::kHeads * Config::kSlots / Config::kWarpgroup;

  ScoreStorage<Config>& storage;
  const Parameters& params;
  const int warp;  // 0..3 in this warpgroup
  const int lane;
  const int row;   // this thread's accumulator rows are `row` and `row + 8`

  // Of Q or dO, as the products want it. What Q takes more would be too much beside the sums of two blocks.
  static constexpr int kRegisterTiles = kWho == 0 ? Config::kRegisterTiles : Config::kValueTiles;
  uint32_t heads[kRegisterTiles * 4][4];
  float scores[kScores];          // S, then P; or dP, then dS
  float lse[2], share[2], delta[2];
  uint32_t head_mask[2];          // all ones where there is such a head
  bool occupied;                  // whether a block had a valid slot
  Ring<Config::kPlaces> ring;
  uint32_t block = 0;             // of all that this CTA has worked on

  __device__ __forceinline__ ScoreConsumer(ScoreStorage<Config>& storage, const Parameters& params)
      : storage(storage),
        params(params),
        warp((threadIdx.x / 32) % 4),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void begin(const QueryPosition& query, int32_t first_head, uint32_t parity) {
    make_statistics<Config, Element>(storage, params, query, first_head, parity);
    const FragmentPlace place(warp, lane);
#pragma unroll
    for (int step = 0; step < kRegisterTiles * 4; ++step) {
      const uint8_t* tile = kWho == 0 ? storage.q(step / 4) : storage.dout(step / 4);
      load_matrix_x4(heads[step], place.address(tile, step % 4));
    }
    // TMA is the next to write there, for the next heads.
    fence_async_shared();
    storage.heads_read.arrive();
    meet(0);
    occupied = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse[r] = storage.lse[row + 8 * r];
      share[r] = storage.share[row + 8 * r];
      delta[r] = storage.delta[row + 8 * r];
      head_mask[r] = first_head + row + 8 * r < params.h_q ? 0xffffffffu : 0u;
    }
  }

  // All consumers, twice for each group of heads.
  __device__ __forceinline__ void meet(uint32_t time) {
    storage.statistics_out.arrive();
    storage.statistics_out.wait(time);
  }

  // S = Q K^T or dP = dO V^T of block number `number`; left in flight.
  __device__ __forceinline__ void issue(float (&sums)[kScores], uint32_t number) {
    Ring<Config::kPlaces> ahead = ring;
    uint64_t keys[Config::kParts];
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      storage.full[ahead.stage].wait(ahead.full);
      keys[part] = sm90::k_major_descriptor(__shfl_sync(0xffffffffu, smem_address(storage.k[ahead.stage][0]), 0));
      ahead.advance();
    }
    const uint64_t q_last = sm90::k_major_descriptor(smem_address(storage.q_last[0]));
    fence_async_shared();
    sm90::pin_registers(sums);
    if (CUPYMLA_TURNS) storage.turn[kWho].wait((number ^ (kWho == 0 ? 1u : 0u)) & 1u);
    sm90::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (CUPYMLA_TURNS && tile == Config::kTurnTile) storage.turn[1 - kWho].arrive();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t columns = sm90::descriptor_advance(
            keys[tile / Config::kPartTiles], tile % Config::kPartTiles * Config::kTileBytes + step * 32);
        if (tile < kRegisterTiles) {
          sm90::mma<typename sm90::Atoms<Element>::ScoresFromRegisters>(sums, heads[tile < kRegisterTiles ? tile * 4 + step : 0], columns,
                                                                        tile + step == 0);
        } else {
          const uint32_t offset = (tile - kRegisterTiles) * Config::kTileBytes + step * 32;
          sm90::mma<typename sm90::Atoms<Element>::Scores>(sums, sm90::descriptor_advance(q_last, offset), columns);
        }
      }
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void finish(float (&sums)[kScores]) {
    sm90::wgmma_wait<0>();
    sm90::pin_registers(sums);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      storage.free[ring.stage].arrive();
      ring.advance();
    }
  }

  __device__ __forceinline__ uint32_t set() const { return block % Config::kSets; }
  __device__ __forceinline__ uint32_t set_parity() const { return block / Config::kSets & 1u; }

  // Calls what follows with which slots are valid. All being so is the rule, and has code of its own: a test for each
  // number is a third of all instructions.
  template <typename Then>
  __device__ __forceinline__ void with_validity(const Then& then) {
    const uint64_t words = *reinterpret_cast<const uint64_t*>(storage.valid[block % Config::kWordSets]);
    occupied = occupied || words != 0;
    if (__all_sync(0xffffffffu, words == ~0ull && (head_mask[0] & head_mask[1]) == ~0u)) {
      then(EverySlot());
    } else {
      then(SlotMask(words, lane, head_mask));
    }
  }

  __device__ __forceinline__ uint8_t* tile(int which) const { return storage.set[set()][which]; }

  // Consumer 0, half of the slots at a time: consumer 1 works on the first while the second is made.
  __device__ __forceinline__ void make_probabilities(float (&scores)[kScores], bool wants_distribution) {
    with_validity([&](const auto& mask) {
      make_probabilities_of_half<0>(scores, mask);
      make_probabilities_of_half<1>(scores, mask);
    });
    if (wants_distribution) {
      const float factor[2] = {storage.factor[row], storage.factor[row + 8]};
      sum_over_heads(scores, factor, storage.distribution[warp], lane);
    }
  }

  template <int kHalf, typename Mask>
  __device__ __forceinline__ void make_probabilities_of_half(float (&scores)[kScores], const Mask& mask) {
    weigh_half<kHalf>(scores, mask, params.scale_log2, lse);
    if constexpr (kHalf == 0) storage.tiles_free[set()].wait(set_parity() ^ 1u);
    put_probabilities<Element, kHalf>(scores, share, FragmentPlace(warp, lane), tile(0), tile(1));
    fence_async_shared();
    storage.p_ready[set()][kHalf].arrive();
  }

  // Adds the sums over heads to the query's distribution, whose element for the block's first slot is `start`. Two CTAs
  // that are at it at a time add two numbers to zero, in either order.
  __device__ __forceinline__ void add_distribution(float* start, int32_t slots_left) {
    named_barrier_sync(kScoreDistribution, Config::kWarpgroup);
    const int slot = warp * 32 + lane;
    if (slot < Config::kSlots && slot < slots_left) {
      const auto& sums = storage.distribution;
      reduce_add_float(start + slot, (sums[0][slot] + sums[1][slot]) + (sums[2][slot] + sums[3][slot]));
    }
    named_barrier_sync(kScoreDistribution, Config::kWarpgroup);
  }

  // Consumer 1. The set of the block before has been read from by now: consumer 0 may have it back.
  __device__ __forceinline__ void make_score_gradients(float (&scores)[kScores]) {
    with_validity([&](const auto& mask) {
      make_score_gradients_of_half<0>(scores, mask);
      make_score_gradients_of_half<1>(scores, mask);
    });
    fence_async_shared();
    named_barrier_sync(kScoresOut, Config::kWarpgroup);
  }

  template <int kHalf, typename Mask>
  __device__ __forceinline__ void make_score_gradients_of_half(float (&scores)[kScores], const Mask& mask) {
    storage.p_ready[set()][kHalf].wait(set_parity());
    put_score_gradients<Element, kHalf>(scores, delta, mask, params.sm_scale, FragmentPlace(warp, lane), tile(0),
                                        tile(1));
  }

  // P and dS of the block to global memory, by one thread.
  __device__ __forceinline__ void store_scores(uint8_t* there) const {
    if (!stores()) return;
    bulk_store(there, tile(0), 2 * Config::kTileBytes, l2_policy_evict_first());
    tma_store_commit();
  }

  // The set of the last store may be written to again.
  __device__ __forceinline__ void free_last_set() const {
    if (!stores() || block == 0) return;
    tma_store_wait_read<0>();
    storage.tiles_free[(block - 1) % Config::kSets].arrive();
  }

  __device__ __forceinline__ bool stores() const { return warp == 0 && lane == 0; }
};

// One group of 64 heads, from its first block to its last.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume(ScoreConsumer<Config, Element, kWho>& consumer,
                                        const SparseQuery<Config::kSlots>& query, int32_t group, uint32_t parity) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  consumer.begin(query, group * Config::kHeads, parity);
  const bool wants_distribution = params.attn_dist != nullptr;
  float* attn_dist = params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
  constexpr bool kAhead = (CUPYMLA_AHEAD >> kWho & 1) != 0;
  const auto weigh = [&](float (&scores)[32], int32_t number) {
    if constexpr (kWho == 0) {
      consumer.make_probabilities(scores, wants_distribution);
      if (wants_distribution) {
        const int32_t first_slot = number * Config::kSlots;
        consumer.add_distribution(attn_dist + first_slot, query.slots - first_slot);
      }
    } else {
      consumer.free_last_set();
      consumer.make_score_gradients(scores);
      consumer.store_scores(stored_scores(params, query, group / kPassGroups, number) +
                            group % kPassGroups * 2 * kScoreTileBytes);
    }
  };
  if constexpr (kAhead) {
    constexpr int kScores = ScoreConsumer<Config, Element, kWho>::kScores;
    float even[kScores], odd[kScores];
    int32_t number = 0;
    if (query.blocks > 0) {
      consumer.issue(even, consumer.block);
      consumer.finish(even);
      for (; number + 2 < query.blocks; number += 2) {
        consumer.issue(odd, consumer.block + 1);
        weigh(even, number);
        consumer.finish(odd);
        ++consumer.block;
        consumer.issue(even, consumer.block + 1);
        weigh(odd, number + 1);
        consumer.finish(even);
        ++consumer.block;
      }
      if (number + 1 < query.blocks) {
        consumer.issue(odd, consumer.block + 1);
        weigh(even, number);
        consumer.finish(odd);
        ++consumer.block;
        weigh(odd, number + 1);
      } else {
        weigh(even, number);
      }
      ++consumer.block;
    }
  } else {
    for (int32_t number = 0; number < query.blocks; ++number) {
      consumer.issue(consumer.scores, consumer.block);
      consumer.finish(consumer.scores);
      weigh(consumer.scores, number);
      ++consumer.block;
    }
  }
  if constexpr (kWho == 0) {
    const int row = consumer.warp * 16 + consumer.lane;
    const int32_t head = group * Config::kHeads + row;
    if (params.sink_terms != nullptr && consumer.lane < 16 && head < params.h_q) {
      store_sink_term(params, query, head, consumer.occupied, storage.delta[row]);
    }
  }
  storage.heads_free.arrive();
  consumer.meet(1);
}

template <typename Config>
__device__ __forceinline__ void produce(ScoreStorage<Config>& storage, const Parameters& params,
                                        const SparseQuery<Config::kSlots>& query, const ScoreGroups& groups,
                                        const TensorMap& q_map, const TensorMap& dout_map) {
  const int warp = (threadIdx.x / 32) % 4;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t l2_policy = l2_policy_evict_last();
  const uint8_t* kv = params.kv + query.batch * params.kv_batch_bytes;
  const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
  Ring<Config::kPlaces> ring;
  uint32_t block = 0, parity = 0;

  // An ordinary load: in the place of indices there may be lists that the kernel before has written.
  const auto load_token = [&](int32_t number) {
    const int32_t slot = number * Config::kSlots + warp * RowCopies::kWarpSlots + lane % RowCopies::kWarpSlots;
    return slot < query.slots ? indices[slot] : -1;
  };

  for (int32_t group = groups.first; group < groups.end; group += groups.step) {
    if (warp == 0 && lane == 0) {
      storage.heads_free.wait(parity ^ 1u);
      constexpr int kTiles = Config::kKeyTiles + Config::kValueTiles;
      storage.heads_full.arrive_and_expect(kTiles * Config::kTileBytes);
      const int32_t head = group * Config::kHeads;
      for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
        tma_load_4d(storage.q(tile), q_map, storage.heads_full, tile * Config::kTileColumns, head, query.query,
                    query.batch);
      }
      for (int tile = 0; tile < Config::kValueTiles; ++tile) {
        tma_load_4d(storage.dout(tile), dout_map, storage.heads_full, tile * Config::kTileColumns, head, query.query,
                    query.batch);
      }
    }
    __syncwarp();
    bool read = false;  // whether Q and dO are known to be in registers
    int32_t token = load_token(0);
    for (int32_t number = 0; number < query.blocks; ++number) {
      const int32_t next_token = load_token(number + 1);
      const RowCopies rows(token, query.token_limit, kv, params.kv_token_bytes, warp, lane);
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        if (!read && ring.stage >= Config::kKeyPlaces) {
          storage.heads_read.wait(parity);
          read = true;
        }
        storage.free[ring.stage].wait(ring.free());
        if (lane == 0) {
          if (part == 0) storage.valid[block % Config::kWordSets][warp] = static_cast<uint16_t>(rows.valid);
          storage.full[ring.stage].arrive();
        }
        rows.copy<Config::kTileBytes>(smem_address(storage.k[ring.stage][0]), part * Config::kPartTiles,
                                      Config::template part_tiles<false>(part), l2_policy);
        storage.full[ring.stage].arrive_after_copies();
        ring.advance();
      }
      ++block;
      token = next_token;
    }
    if (!read) storage.heads_read.wait(parity);
    parity ^= 1u;
  }
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume_groups(ScoreStorage<Config>& storage, const Parameters& params,
                                               const SparseQuery<Config::kSlots>& query, const ScoreGroups& groups) {
  ScoreConsumer<Config, Element, kWho> consumer(storage, params);
  uint32_t parity = 0;
  for (int32_t group = groups.first; group < groups.end; group += groups.step) {
    consume(consumer, query, group, parity);
    parity ^= 1u;
  }
  // Shared memory has to be read from before the CTA ends.
  if (kWho == 1 && consumer.stores()) tma_store_wait<0>();
}

template <typename Config, typename Element>
__device__ __forceinline__ void scores(ScoreStorage<Config>& storage, const Parameters& params, uint32_t index,
                                       const TensorMap& q_map, const TensorMap& dout_map) {
  const ScoreGroups groups(params, index);
  const uint32_t token = groups.token;
  if (token >= params.score_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    init_barriers(storage);
  }
  wait_for_grid_ahead(params.followed != 0);
  // One thread reads how many slots there are: all must wait for the same blocks, whoever writes to topk_length.
  if (threadIdx.x == 0) {
    storage.slots = SparseQuery<Config::kSlots>::read_slots(params, QueryPosition(params, token));
  }
  __syncthreads();
  const SparseQuery<Config::kSlots> query(params, token, storage.slots);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == 2) {
    registers_give_back<Config::kProducerRegisters>();
    produce(storage, params, query, groups, q_map, dout_map);
  } else if (warpgroup == 0) {
    registers_take<Config::kConsumerRegisters>();
    consume_groups<Config, Element, 0>(storage, params, query, groups);
  } else {
    registers_take<Config::kConsumerRegisters>();
    consume_groups<Config, Element, 1>(storage, params, query, groups);
  }
}

}  // namespace cupymla::sparse_mla_bwd
