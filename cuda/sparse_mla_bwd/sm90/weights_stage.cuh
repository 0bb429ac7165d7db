// The stage `weights`: P and dS of all slots of a query, 64 heads to a CTA. The stage `columns` makes dQ and dKV of
// them.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "weights_consumer.cuh"
#include "weights_producer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element>
__device__ __forceinline__ void make_weights(WeightsStorage<Config>& storage, const Parameters& params,
                                             const TensorMap& q_map, const TensorMap& dout_map) {
  const uint32_t place = blockIdx.x / kWeightGroups, token = params.query_begin + place;
  if (token >= params.query_end) return;
  const int32_t first_head = static_cast<int32_t>(blockIdx.x % kWeightGroups) * Config::kHeads;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    storage.init();
    storage.occupied = 0;
  }
  wait_for_grid_ahead(params.followed != 0);
  // One thread reads how many slots there are: all must wait for the same tiles, whoever writes to topk_length.
  if (threadIdx.x == 0) {
    storage.slots = SparseQuery<Config::kSlots>::read_slots(params, QueryPosition(params, token));
    stored_slots(params, place)[blockIdx.x % kWeightGroups] = storage.slots;
  }
  __syncthreads();
  const SparseQuery<Config::kSlots> query(params, token, storage.slots);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    registers_give_back<Config::kProducerRegisters>();
    WeightsProducer<Config> producer{storage, params, query};
    producer.load_heads(first_head, q_map, dout_map);
    producer.run();
    producer.store_sink_terms(first_head);
  } else if (warpgroup == 0) {
    registers_take<Config::kConsumerRegisters>();
    WeightsConsumer<Config, Element, 0>(storage, params, first_head).run(query, place);
  } else {
    registers_take<Config::kConsumerRegisters>();
    WeightsConsumer<Config, Element, 1>(storage, params, first_head).run(query, place);
  }
}

}  // namespace cupymla::sparse_mla_bwd
