// The attention stage: roles to warpgroups, and one query from its first pass to its last.
#pragma once

#include "../../common/cluster_delivery.cuh"
#include "../../common/grid_dependency.cuh"
#include "../../common/opaque.cuh"
#include "../../common/registers.cuh"
#include "pinned_position.cuh"
#include "producer.cuh"
#include "statistics.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config>
__device__ __forceinline__ void init_barriers(Storage<Config>& storage) {
  constexpr uint32_t kEveryConsumer = Config::kConsumerThreads;
  storage.heads_full.init(1);
  storage.heads_free.init(kEveryConsumer);
  for (int part = 0; part < Config::kParts; ++part) {
    storage.full[0][part].init(Config::kWarpgroup + (part == Config::kParts - 1 ? 4 : 0));
  }
  for (Mbarrier& tiles : storage.free[0]) tiles.init(kEveryConsumer);
  storage.tiles_free.init(kEveryConsumer);
  for (Mbarrier& half : storage.p_ready) half.init(Config::kWarpgroup);
  storage.decided.init(kEveryConsumer);
  storage.statistics_out.init(kEveryConsumer);
  storage.cleared.init(kEveryConsumer);
  storage.slots_in.init(1);
  storage.ds_ready.init(Config::kWarpgroup);
  storage.staging_ready.init(kEveryConsumer / 32);
  storage.first_ready.init(Config::kWarpgroup);
  for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
    storage.received[consumer].init(1);
    storage.drained[consumer].init(Config::kWarpgroup / 32);
  }
  fence_mbarrier_init();
}

// Two CTAs to a query: every thread of both has come here.
template <typename Config>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
}

// The second CTA gets the number of slots from the first, so that neither reads the other's memory, which is gone when
// that one has ended.
template <typename Config>
__device__ __forceinline__ void share_slots(Storage<Config>& storage) {
  if constexpr (Config::kCluster > 1) {
    if (cluster_rank() != 0) {
      storage.slots_in.wait(0);
    } else if (threadIdx.x == 0) {
      const uint32_t there = storage.other - smem_address(&storage);
      cluster_store_async_int32(there + smem_address(&storage.slots), storage.slots,
                                there + smem_address(&storage.slots_in));
    }
  }
}

// Two CTAs meet between passes, for the order in which they add to the distribution. Behind the last pass nothing of
// the other CTA is under way to this one's memory: what it sends was waited for (slots_in, staging_ready, received,
// drained). So each leaves when it is done, and does not wait for its reductions and stores, as the barrier's release
// would.
template <typename Config>
__device__ __forceinline__ void end_pass(const Parameters& params, int32_t pass) {
  if (pass + 1 < params.passes) sync_cluster<Config>();
}

// Kept, or worked out: ptxas spills where several queries keep it, and where one works it out.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ uint32_t parity_of_pass(const Consumer<Config, Element, kWho>& consumer, int32_t pass) {
  return Config::kQueries == 1 ? consumer.pass_parity : static_cast<uint32_t>(pass) & 1u;
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume(Consumer<Config, Element, kWho>& consumer,
                                        const Work<Config>& query, int32_t pass) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  const int32_t head = first_head<Config>(pass);
  storage.heads_full.wait(parity_of_pass(consumer, pass));
  make_statistics<Config, Element>(storage, params, pinned_position(query), head, pass);
  consumer.begin_pass(head);
  const bool wants_distribution = params.attn_dist != nullptr;
  // Found again for each block: kept, it would cost two registers.
  const auto attn_dist = [&](int32_t first_slot) {
    const QueryPosition at = pinned_position(query);
    return params.attn_dist + at.batch * params.attn_dist_batch + at.query * params.attn_dist_query + first_slot;
  };
  // Which of two CTAs adds first is fixed: the second adds after it has waited for the first's staging.
  const bool adds_late = Config::kCluster > 1 && cluster_rank() != 0;
  constexpr int kPartsAhead = Consumer<Config, Element, kWho>::kPartsAhead;
  if (query.slots > 0) consumer.template multiply_scores<0, kPartsAhead>(consumer.k_parity);
  for (int32_t first_slot = 0; first_slot < query.slots; first_slot += Config::kSlots) {
    const int32_t slots_left = query.slots - first_slot;
    consumer.template multiply_scores<kPartsAhead, Config::kParts>(consumer.k_parity);
    if constexpr (kWho == 0) {
      consumer.make_probabilities(wants_distribution);
      if constexpr (Config::kQueries > 1) {
        if (wants_distribution) consumer.put_distribution(query, first_slot);
      } else if (wants_distribution && !adds_late) {
        consumer.template add_distribution<(Config::kCluster > 1)>(attn_dist(first_slot), slots_left);
      }
    } else {
      consumer.make_score_gradients();
    }
    storage.ds_ready.wait(consumer.k_parity);
    const RowTargets<Config> targets(params, pinned_position(query), first_slot, pass, consumer.row, consumer.slots);
    Gradients<Config, Element, kWho>(consumer, targets).run(slots_left > Config::kSlots);
    if constexpr (kWho == 0) {
      if (wants_distribution && adds_late) {
        consumer.template add_distribution<false>(attn_dist(first_slot), slots_left);
      }
    }
    consumer.k_parity ^= 1u;
  }
  const QueryPosition position = pinned_position(query);
  if constexpr (kWho == 0) store_sink_terms(consumer, position, head, pass);
  storage.heads_free.arrive();
  if constexpr (Config::kQueries == 1) consumer.pass_parity ^= 1u;
  store_query_gradient(consumer, position, head, pass);
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume_query(Storage<Config>& storage, const Parameters& params,
                                              const Work<Config>& query) {
  Consumer<Config, Element, kWho> consumer(storage, params);
  for (int32_t pass = 0; Work<Config>::has_pass(params, storage, pass); ++pass) {
    consume(consumer, query, pass);
    // Row statistics are written anew; the distribution is added to in the order of the passes.
    meet_consumers(storage, 1);
    end_pass<Config>(params, pass);
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void attention(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                          const TensorMap& dout_map) {
  const uint32_t token = params.query_begin + blockIdx.x / Config::kCluster;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    init_barriers(storage);
    if constexpr (Config::kCluster > 1) {
      storage.other = cluster_address(smem_address(&storage), 1 - cluster_rank());
      if (cluster_rank() != 0) storage.slots_in.arrive_and_expect(sizeof(storage.slots));
    }
  }
  wait_for_grid_ahead(params.followed != 0);
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    Work<Config>::read_slots(params, token, storage);
  }
  __syncthreads();
  sync_cluster<Config>();
  share_slots(storage);

  const Work<Config> query(params, token, storage);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == 2) {
    registers_give_back<Config::kProducerRegisters>();
    Producer<Config> producer(storage, params);
    for (int32_t pass = 0; Work<Config>::has_pass(params, storage, pass); ++pass) {
      producer.run(query, pass, q_map, dout_map);
      end_pass<Config>(params, pass);
    }
  } else if (warpgroup == 0) {
    registers_take<Config::kConsumerRegisters>();
    consume_query<Config, Element, 0>(storage, params, query);
  } else {
    registers_take<Config::kConsumerRegisters>();
    consume_query<Config, Element, 1>(storage, params, query);
  }
}

}  // namespace cupymla::sparse_mla_bwd
