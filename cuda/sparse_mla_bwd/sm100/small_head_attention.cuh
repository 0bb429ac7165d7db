// The attention stage of the small-head variant: roles to warps, and one query.
#pragma once

#include "../../common/warp.cuh"
#include "small_head_gradients.cuh"
#include "small_head_products.cuh"
#include "producer.cuh"
#include "reducers.cuh"
#include "set_up.cuh"

namespace cupymla::sparse_mla_bwd {

// None but those that both have.
template <typename Config>
__device__ __forceinline__ void init_own_barriers(SmallHeadStorage<Config>&) {}

template <typename Config, typename Element>
__device__ __forceinline__ void work(SmallHeadWorker<Config, Element>& worker,
                                     const SparseQuery<Config::kTileKeys>& query) {
  float* const attn_dist = worker.distribution_row(query);
  if (query.blocks > 0) worker.begin(query);
  for (int32_t block = 0; block < query.blocks; ++block) {
    const int32_t first_entry = block * Config::kTileKeys;
    worker.make_tiles(attn_dist == nullptr ? nullptr : attn_dist + first_entry, query.entries - first_entry);
    worker.state.advance();
  }
  store_sink_terms(worker, query);
  // After the last block's products; the other CTA must not leave before they have told it, either.
  if (query.blocks > 0) worker.storage.tiles_free.wait(worker.state.parity() ^ 1u);
  store_query_gradient(worker, query, query.blocks > 0);
}

template <typename Config, typename Element, bool kFp16>
__device__ __forceinline__ void attention(SmallHeadStorage<Config>& storage, const Parameters& params,
                                          const TensorMap& q_map, const TensorMap& dout_map, const TensorMap& kv_map) {
  const uint32_t token = params.query_begin + blockIdx.x / Config::kCluster;
  if (token >= params.query_end) return;
  const SparseQuery<Config::kTileKeys> query = begin_query(storage, params, token);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp == Config::kProducerWarp) {
    Producer<SmallHeadStorage<Config>>{storage, params}.run(query, 0, q_map, dout_map, kv_map);
  } else if (warp == Config::kMultiplyWarp) {
    if (elect_one()) SmallHeadProducts<Config, kFp16>{storage}.run(query.blocks);
  } else if (warp >= Config::kReducerWarp) {
    Reducer<SmallHeadStorage<Config>>{storage, params}.run(query, 0);
  } else {
    SmallHeadWorker<Config, Element> worker(storage, params);
    work(worker, query);
  }
  sync_cluster();
  if (warp == Config::kMultiplyWarp) sm100::tmem_free(storage.tmem, Config::kTmemColumns);
}

}  // namespace cupymla::sparse_mla_bwd
