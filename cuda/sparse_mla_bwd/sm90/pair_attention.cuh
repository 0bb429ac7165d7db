// The attention stage of a pair of CTAs: roles to warpgroups, and one query from its first pass to its last.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../common/registers.cuh"
#include "pair_producer.cuh"
#include "pair_statistics.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config>
__device__ __forceinline__ void init_barriers(PairStorage<Config>& storage) {
  constexpr uint32_t kEveryConsumer = Config::kConsumerThreads;
  storage.heads_full.init(1);
  storage.full.init(Config::kWarpgroup + 4);
  storage.free.init(kEveryConsumer);
  storage.room.init(kEveryConsumer / 32);
  for (auto& of : storage.partial) {
    for (Mbarrier& warp : of) warp.init(1);
  }
  storage.ready.init(kEveryConsumer);
  storage.delta_in.init(1);
  storage.distribution_in.init(1);
  storage.statistics_out.init(kEveryConsumer);
  storage.slots_in.init(1);
  fence_mbarrier_init();
}

// Every thread of both CTAs has come here: at the start, and between passes. Behind the last pass nothing of the other
// CTA is under way to this one's memory: what it sends was waited for. So each leaves when it is done, and does not
// wait for its reductions and stores, as the barrier's release would.
__device__ __forceinline__ void sync_pair() {
  cluster_arrive();
  cluster_wait();
}

// The second CTA gets the number of slots from the first, so that neither reads the other's memory, which is gone when
// that one has ended.
template <typename Config>
__device__ __forceinline__ void share_slots(PairStorage<Config>& storage) {
  if (cluster_rank() != 0) {
    storage.slots_in.wait(0);
  } else if (threadIdx.x == 0) {
    cluster_store_async_int32(cluster_address(smem_address(&storage.slots), 1), storage.slots,
                              cluster_address(smem_address(&storage.slots_in), 1));
  }
}

// Adds the sums of the block's P over heads to the query's distribution, by consumer 0 of the first CTA. The same
// thread adds in each pass, so the order is fixed.
template <typename Config>
__device__ __forceinline__ void add_distribution(PairStorage<Config>& storage, const Parameters& params,
                                                 int32_t first_slot, uint32_t parity) {
  if (threadIdx.x == 0) storage.distribution_in.arrive_and_expect(sizeof(storage.other_distribution));
  storage.distribution_in.wait(parity);
  const int32_t slot = threadIdx.x;
  if (slot < Config::kSlots && first_slot + slot < stored_slots(storage)) {
    const QueryPosition query = stored_position(storage);
    float* start = params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
    const auto& own = storage.distribution;
    const auto& other = storage.other_distribution;
    reduce_add_float(start + first_slot + slot, (own[0][slot] + own[1][slot]) + (other[0][slot] + other[1][slot]));
  }
}

// P and dS of the block are out.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void begin_gradients(PairConsumer<Config, Element, kWho>& consumer) {
  consumer.storage.ready.wait(consumer.parity());
  fence_async_shared();
  if (kWho == 0 && consumer.params.attn_dist != nullptr && cluster_rank() == 0) {
    add_distribution(consumer.storage, consumer.params, consumer.first_slot(), consumer.parity());
  }
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume(PairConsumer<Config, Element, kWho>& consumer) {
  using Block = PairGradients<Config, Element, kWho>;
  auto& storage = consumer.storage;
  make_statistics(consumer, stored_position(storage), consumer.pass());
  consumer.begin_pass(consumer.pass());
  if (stored_slots(storage) > 0) {
    float scores[Block::kTileSums];
    consumer.wait_for_keys();
    consumer.issue_scores(scores, [](int) {});
    consumer.finish_scores(scores);
    consumer.make_weights(scores);
  }
  while (consumer.first_slot() < stored_slots(storage)) {
    const bool more = stored_slots(storage) - consumer.first_slot() > Config::kSlots;
    begin_gradients(consumer);
    Block block(consumer);
    float second[Block::kTileSums];
    block.run(second, !more && consumer.pass() + 1 >= consumer.params.passes);
    consumer.bits = (consumer.bits ^ consumer.kParity) + consumer.kBlock;
    // S of the next block, whose keys have been asked for since dQ was done. Behind the last one it is multiplied in
    // vain: a condition around products that are under way would have ptxas wait for them.
    if (more) consumer.wait_for_keys();
    float scores[Block::kTileSums];
    const auto places = block.places_of(1);
    consumer.issue_scores(scores, [&](int product) { block.send_between(places, second, product); });
    block.send_behind(places, second);
    consumer.finish_scores(scores);
    if (more) consumer.make_weights(scores);
  }
  const QueryPosition position = stored_position(storage);
  store_sink_terms(consumer, position, consumer.pass());
  store_query_gradient(consumer, position, consumer.pass());
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume_query(PairStorage<Config>& storage, const Parameters& params) {
  PairConsumer<Config, Element, kWho> consumer(storage, params);
  while (true) {
    consume(consumer);
    const int32_t pass = consumer.pass();
    if (pass + 1 >= params.passes) return;
    meet_consumers(storage, 1);
    // All have read it, and wait for one another before they read it again.
    if (threadIdx.x == 0) storage.pass = pass + 1;
    sync_pair();
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void attention(PairStorage<Config>& storage, const Parameters& params,
                                          const TensorMap& q_map, const TensorMap& dout_map,
                                          const TensorMap& rope_map) {
  const uint32_t token = params.query_begin + blockIdx.x / Config::kCluster;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    if (Config::kHasRope) tma_prefetch_descriptor(rope_map);
    init_barriers(storage);
    const SparseQuery<Config::kSlots> query(params, token, 0);
    storage.batch = query.batch;
    storage.query = query.query;
    storage.limit = query.token_limit;
    storage.pass = 0;
    if (cluster_rank() != 0) storage.slots_in.arrive_and_expect(sizeof(storage.slots));
  }
  wait_for_grid_ahead(params.followed != 0);
  // One thread of both reads how many slots there are: if topk_length changed under way and each read it for itself,
  // they would wait for blocks that never come.
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    storage.slots = SparseQuery<Config::kSlots>::read_slots(params, QueryPosition(params, token));
  }
  sync_pair();
  share_slots(storage);

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    registers_give_back<Config::kProducerRegisters>();
    PairProducer<Config> producer(storage, params);
    for (; producer.pass() < params.passes; producer.end_pass()) {
      producer.run(q_map, dout_map, rope_map);
      if (producer.pass() + 1 < params.passes) sync_pair();
    }
  } else if (warpgroup == 0) {
    registers_take<Config::kConsumerRegisters>();
    consume_query<Config, Element, 0>(storage, params);
  } else {
    registers_take<Config::kConsumerRegisters>();
    consume_query<Config, Element, 1>(storage, params);
  }
}

}  // namespace cupymla::sparse_mla_bwd
