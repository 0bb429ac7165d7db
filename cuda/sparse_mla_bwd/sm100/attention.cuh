// The attention stage where heads are many: roles to warps, and one query from its first head block to its last.
#pragma once

#include "../../common/warp.cuh"
#include "gradients.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "reducers.cuh"
#include "set_up.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config>
__device__ __forceinline__ void init_own_barriers(Storage<Config>& storage) {
  storage.consumed.init(Config::kCluster * Config::kWorkerWarps);
}

template <typename Config, typename Element>
__device__ __forceinline__ void work(Worker<Config, Element>& worker, const SparseQuery<Config::kTileKeys>& query,
                                     int32_t head_block) {
  const int32_t first_head = head_block * Config::kHeads;
  float* const attn_dist = worker.distribution_row(query);
  worker.occupied = false;
  if (query.blocks > 0) worker.begin_head_block(query, head_block);
  for (int32_t block = 0; block < query.blocks; ++block) {
    const int32_t first_entry = block * Config::kTileKeys;
    worker.make_tiles(attn_dist == nullptr ? nullptr : attn_dist + first_entry, query.entries - first_entry);
    worker.state.advance();
  }
  store_sink_terms(worker, query, first_head);
  // After the last block's products; nobody may go on before the other CTA has told that its own are done, either.
  if (query.blocks > 0) worker.storage.tiles_free.wait(worker.state.parity() ^ 1u);
  store_query_gradient(worker, query, first_head, query.blocks > 0);
}

template <typename Config, typename Element, bool kFp16>
__device__ __forceinline__ void attention(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map,
                                          const TensorMap& dout_map, const TensorMap& kv_map) {
  const uint32_t token = params.query_begin + blockIdx.x / Config::kCluster;
  if (token >= params.query_end) return;
  const SparseQuery<Config::kTileKeys> query = begin_query(storage, params, token);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == Config::kProducerWarp) {
    Producer<Storage<Config>> producer{storage, params};
    for (int32_t head_block = 0; head_block < params.head_blocks; ++head_block) {
      producer.run(query, head_block * Config::kHeads, q_map, dout_map, kv_map);
      sync_cluster();
    }
  } else if (warp == Config::kMultiplyWarp) {
    Products<Config, kFp16> products{storage};
    for (int32_t head_block = 0; head_block < params.head_blocks; ++head_block) {
      if (elect_one()) products.run(query);
      sync_cluster();
    }
    sm100::tmem_free(storage.tmem, Config::kTmemColumns);
  } else if (warp >= Config::kReducerWarp) {
    Reducer<Storage<Config>> reducer{storage, params};
    for (int32_t head_block = 0; head_block < params.head_blocks; ++head_block) {
      reducer.run(query, head_block);
      sync_cluster();
    }
  } else {
    Worker<Config, Element> worker(storage, params);
    for (int32_t head_block = 0; head_block < params.head_blocks; ++head_block) {
      work(worker, query, head_block);
      sync_cluster();
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
