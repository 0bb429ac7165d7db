// The attention stage of a 2-CTA cluster: roles to warpgroups, and one query from its first head block to its last.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "../../common/registers.cuh"
#include "cluster_producer.cuh"
#include "cluster_statistics.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config>
__device__ __forceinline__ void init_barriers(ClusterStorage<Config>& storage) {
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
  storage.entries_in.init(1);
  fence_mbarrier_init();
}

// Every thread of both CTAs has come here: at the start, and between head blocks. Behind the last head block nothing of
// the other CTA is under way to this one's memory: what it sends was waited for. So each leaves when it is done, and
// does not wait for its reductions and stores, as the barrier's release would.
__device__ __forceinline__ void sync_cta_cluster() {
  cluster_arrive();
  cluster_wait();
}

// The second CTA gets the number of entries from the first, so that neither reads the other's memory, which is gone
// when that one has ended.
template <typename Config>
__device__ __forceinline__ void share_entries(ClusterStorage<Config>& storage) {
  if (cluster_rank() != 0) {
    storage.entries_in.wait(0);
  } else if (threadIdx.x == 0) {
    cluster_store_async_int32(cluster_address(smem_address(&storage.entries), 1), storage.entries,
                              cluster_address(smem_address(&storage.entries_in), 1));
  }
}

// Adds the sums of the block's P over heads to the query's distribution, by consumer 0 of the first CTA. The same
// thread adds in each head block, so the order is fixed.
template <typename Config>
__device__ __forceinline__ void add_distribution(ClusterStorage<Config>& storage, const Parameters& params,
                                                 int32_t first_entry, uint32_t parity) {
  if (threadIdx.x == 0) storage.distribution_in.arrive_and_expect(sizeof(storage.other_distribution));
  storage.distribution_in.wait(parity);
  const int32_t entry = threadIdx.x;
  if (entry < Config::kTileKeys && first_entry + entry < stored_entries(storage)) {
    const QueryPosition query = stored_position(storage);
    float* start = params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
    const auto& own = storage.distribution;
    const auto& other = storage.other_distribution;
    reduce_add_float(start + first_entry + entry,
                     (own[0][entry] + own[1][entry]) + (other[0][entry] + other[1][entry]));
  }
}

// P and dS of the block are out.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void begin_gradients(ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer) {
  consumer.storage.ready.wait(consumer.parity());
  fence_async_shared();
  if (kWarpgroupIdx == 0 && consumer.params.attn_dist != nullptr && cluster_rank() == 0) {
    add_distribution(consumer.storage, consumer.params, consumer.first_entry(), consumer.parity());
  }
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void consume(ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer) {
  using Block = ClusterGradients<Config, Element, kWarpgroupIdx>;
  auto& storage = consumer.storage;
  make_statistics(consumer, stored_position(storage), consumer.head_block());
  consumer.begin_head_block(consumer.head_block());
  if (stored_entries(storage) > 0) {
    float scores[Block::kTileSums];
    consumer.wait_for_keys();
    consumer.issue_scores(scores, [](int) {});
    consumer.finish_scores(scores);
    consumer.make_p_ds(scores);
  }
  while (consumer.first_entry() < stored_entries(storage)) {
    const bool more = stored_entries(storage) - consumer.first_entry() > Config::kTileKeys;
    begin_gradients(consumer);
    Block block(consumer);
    float second[Block::kTileSums];
    block.run(second, !more && consumer.head_block() + 1 >= consumer.params.head_blocks);
    consumer.bits = (consumer.bits ^ consumer.kParity) + consumer.kBlock;
    // S of the next block, whose keys have been asked for since dQ was done. Behind the last one it is multiplied in
    // vain: a condition around products that are under way would have ptxas wait for them.
    if (more) consumer.wait_for_keys();
    float scores[Block::kTileSums];
    const auto places = block.places_of(1);
    consumer.issue_scores(scores, [&](int product) { block.send_between(places, second, product); });
    block.send_behind(places, second);
    consumer.finish_scores(scores);
    if (more) consumer.make_p_ds(scores);
  }
  const QueryPosition position = stored_position(storage);
  store_sink_terms(consumer, position, consumer.head_block());
  store_query_gradient(consumer, position, consumer.head_block());
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void consume_query(ClusterStorage<Config>& storage, const Parameters& params) {
  ClusterConsumer<Config, Element, kWarpgroupIdx> consumer(storage, params);
  while (true) {
    consume(consumer);
    const int32_t head_block = consumer.head_block();
    if (head_block + 1 >= params.head_blocks) return;
    meet_consumers(storage, 1);
    // All have read it, and wait for one another before they read it again.
    if (threadIdx.x == 0) storage.head_block = head_block + 1;
    sync_cta_cluster();
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void attention(ClusterStorage<Config>& storage, const Parameters& params,
                                          const TensorMap& q_map, const TensorMap& dout_map,
                                          const TensorMap& rope_map) {
  const uint32_t token = params.query_begin + blockIdx.x / Config::kCluster;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    if (Config::kHasRope) tma_prefetch_descriptor(rope_map);
    init_barriers(storage);
    const SparseQuery<Config::kTileKeys> query(params, token, 0);
    storage.batch = query.batch;
    storage.query = query.query;
    storage.limit = query.token_limit;
    storage.head_block = 0;
    if (cluster_rank() != 0) storage.entries_in.arrive_and_expect(sizeof(storage.entries));
  }
  wait_for_primary_grid(params.has_dependent != 0);
  // One thread of both reads how many entries there are: if topk_length changed under way and each read it for itself,
  // they would wait for blocks that never come.
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    storage.entries = SparseQuery<Config::kTileKeys>::read_entries(params, QueryPosition(params, token));
  }
  sync_cta_cluster();
  share_entries(storage);

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    ClusterProducer<Config> producer(storage, params);
    for (; producer.head_block() < params.head_blocks; producer.end_head_block()) {
      producer.run(q_map, dout_map, rope_map);
      if (producer.head_block() + 1 < params.head_blocks) sync_cta_cluster();
    }
  } else if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_query<Config, Element, 0>(storage, params);
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_query<Config, Element, 1>(storage, params);
  }
}

}  // namespace cupymla::sparse_mla_bwd
