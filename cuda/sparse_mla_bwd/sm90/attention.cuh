// The attention stage of a single CTA: roles to warpgroups, and one query from its first head block to its last.
#pragma once

#include "../../common/grid_dependency.cuh"
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
  for (Mbarrier& side : storage.free[0]) side.init(kEveryConsumer);
  storage.tiles_free.init(kEveryConsumer);
  for (Mbarrier& half : storage.p_ready) half.init(Config::kWarpgroup);
  storage.decided.init(kEveryConsumer);
  storage.statistics_out.init(kEveryConsumer);
  storage.cleared.init(kEveryConsumer);
  storage.ds_ready.init(Config::kWarpgroup);
  fence_mbarrier_init();
}

// Read whenever it is wanted: there is no register to keep it in.
template <typename Config>
__device__ __forceinline__ int32_t entries_of(const Storage<Config>& storage) {
  return *static_cast<const volatile int32_t*>(&storage.entries);
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void consume(Consumer<Config, Element, kWarpgroupIdx>& consumer,
                                        const Work<Config>& query) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  storage.heads_full.wait(static_cast<uint32_t>(consumer.head_block()) & 1u);
  make_statistics<Config, Element>(consumer, pinned_position(query));
  consumer.begin_head_block();
  const bool wants_distribution = params.attn_dist != nullptr;
  // Found again for each block: kept, it would cost two registers.
  const auto attn_dist = [&](int32_t first_entry) {
    const QueryPosition at = pinned_position(query);
    return params.attn_dist + at.batch * params.attn_dist_batch + at.query * params.attn_dist_query + first_entry;
  };
  constexpr bool kMultipliesAhead = Consumer<Config, Element, kWarpgroupIdx>::kMultipliesAhead;
  if (kMultipliesAhead && entries_of(storage) > 0) consumer.multiply_scores(consumer.parity());
  for (int32_t first_entry = 0; first_entry < entries_of(storage); first_entry += Config::kTileKeys) {
    const int32_t entries_left = entries_of(storage) - first_entry;
    if constexpr (!kMultipliesAhead) consumer.multiply_scores(consumer.parity());
    if constexpr (kWarpgroupIdx == 0) {
      consumer.make_probabilities(wants_distribution);
      if constexpr (Config::kQueries > 1) {
        if (wants_distribution) consumer.put_distribution(query, first_entry);
      } else if (wants_distribution) {
        consumer.add_distribution(attn_dist(first_entry), entries_left);
      }
    } else {
      consumer.make_score_gradients();
    }
    storage.ds_ready.wait(consumer.parity());
    if constexpr (Config::kPacked) {
      const PackedEntryTargets<Config> targets(storage, params, first_entry, consumer.head_block(),
                                               consumer.row(), consumer.entries);
      Gradients<Config, Element, kWarpgroupIdx>(consumer, targets).run(entries_left > Config::kTileKeys);
    } else {
      const RowTargets<Config> targets(params, pinned_position(query), first_entry, consumer.head_block(),
                                       consumer.row(), consumer.entries);
      Gradients<Config, Element, kWarpgroupIdx>(consumer, targets).run(entries_left > Config::kTileKeys);
    }
    consumer.bits ^= consumer.kParity;
  }
  const QueryPosition position = pinned_position(query);
  if constexpr (kWarpgroupIdx == 0) store_sink_terms(consumer, position);
  storage.heads_free.arrive();
  store_query_gradient(consumer, position);
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void consume_query(Storage<Config>& storage, const Parameters& params,
                                              const Work<Config>& query) {
  Consumer<Config, Element, kWarpgroupIdx> consumer(storage, params);
  while (Work<Config>::has_head_block(params, storage, consumer.head_block())) {
    consume(consumer, query);
    meet_consumers(storage, 1);  // row statistics are written anew
    consumer.bits += consumer.kHeadBlock;
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void attention(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                          const TensorMap& dout_map) {
  const uint32_t token = params.query_begin + blockIdx.x;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    init_barriers(storage);
  }
  wait_for_primary_grid(params.has_dependent != 0);
  if (threadIdx.x == 0) Work<Config>::read_entries(params, token, storage);
  __syncthreads();

  const Work<Config> query(params, token, storage);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == 2) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    Producer<Config> producer(storage, params);
    for (int32_t head_block = 0; Work<Config>::has_head_block(params, storage, head_block); ++head_block) {
      producer.run(query, head_block, q_map, dout_map);
    }
  } else if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_query<Config, Element, 0>(storage, params, query);
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_query<Config, Element, 1>(storage, params, query);
  }
}

}  // namespace cupymla::sparse_mla_bwd
