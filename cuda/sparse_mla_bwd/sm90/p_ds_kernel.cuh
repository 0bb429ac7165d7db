// The kernel `p_ds`: P and dS of all entries of a query, 64 heads to a CTA. The kernel `dq_dkv` makes dQ and dKV of
// them.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "p_ds_consumer.cuh"
#include "p_ds_producer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element>
__device__ __forceinline__ void make_p_ds(PdsStorage<Config>& storage, const Parameters& params,
                                          const TensorMap& q_map, const TensorMap& dout_map) {
  const uint32_t place = blockIdx.x / kPdsGroups, token = params.query_begin + place;
  if (token >= params.query_end) return;
  const int32_t first_head = static_cast<int32_t>(blockIdx.x % kPdsGroups) * Config::kHeads;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    storage.init();
    storage.occupied = 0;
  }
  wait_for_primary_grid(params.has_dependent != 0);
  // One thread reads how many entries there are: all must wait for the same tiles, whoever writes to topk_length.
  if (threadIdx.x == 0) {
    storage.entries = SparseQuery<Config::kTileKeys>::read_entries(params, QueryPosition(params, token));
    stored_entries(params, place)[blockIdx.x % kPdsGroups] = storage.entries;
  }
  __syncthreads();
  const SparseQuery<Config::kTileKeys> query(params, token, storage.entries);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    PdsProducer<Config> producer{storage, params, query};
    producer.load_heads(first_head, q_map, dout_map);
    producer.run();
    producer.store_sink_terms(first_head);
  } else if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    PdsConsumer<Config, Element, 0>(storage, params, first_head).run(query, place);
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    PdsConsumer<Config, Element, 1>(storage, params, first_head).run(query, place);
  }
}

}  // namespace cupymla::sparse_mla_bwd
