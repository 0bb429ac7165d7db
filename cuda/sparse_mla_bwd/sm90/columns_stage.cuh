// The stage `columns`: dQ and dKV from the P and dS that the stage `weights` has stored, 192 columns of a query to a
// CTA.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "columns_consumer.cuh"
#include "columns_producer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void consume_columns(ColumnsStorage<Config>& storage, const Parameters& params,
                                                const SparseQuery<Config::kSlots>& query) {
  if (Share<Config>::is_last()) {
    ColumnsConsumer<Config, Element, kWho, true>(storage, params).run(query);
  } else {
    ColumnsConsumer<Config, Element, kWho, false>(storage, params).run(query);
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void make_columns(ColumnsStorage<Config>& storage, const Parameters& params,
                                             const TensorMap& q_map, const TensorMap& dout_map) {
  const uint32_t place = Share<Config>::place(), token = params.query_begin + place;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    storage.init();
  }
  wait_for_grid_ahead(params.followed != 0);
  const int32_t* const slots = stored_slots(params, place);
  const SparseQuery<Config::kSlots> query(params, token, min(slots[0], slots[1]));
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    registers_give_back<Config::kProducerRegisters>();
    ColumnsProducer<Config> producer{storage, params, query};
    producer.load_heads(q_map, dout_map);
    producer.run(place);
  } else if (warpgroup == 0) {
    registers_take<Config::kConsumerRegisters>();
    consume_columns<Config, Element, 0>(storage, params, query);
  } else {
    registers_take<Config::kConsumerRegisters>();
    consume_columns<Config, Element, 1>(storage, params, query);
  }
}

}  // namespace cupymla::sparse_mla_bwd
