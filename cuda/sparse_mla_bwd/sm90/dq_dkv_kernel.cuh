// The kernel `dq_dkv`: dQ and dKV from the P and dS that the kernel `p_ds` has stored, 192 columns of a query to a
// CTA.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "dq_dkv_consumer.cuh"
#include "dq_dkv_producer.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void consume_dq_dkv(DqDkvStorage<Config>& storage, const Parameters& params,
                                               const SparseQuery<Config::kTileKeys>& query) {
  if (ColumnSplit<Config>::is_last()) {
    DqDkvConsumer<Config, Element, kWarpgroupIdx, true>(storage, params).run(query);
  } else {
    DqDkvConsumer<Config, Element, kWarpgroupIdx, false>(storage, params).run(query);
  }
}

template <typename Config, typename Element>
__device__ __forceinline__ void make_dq_dkv(DqDkvStorage<Config>& storage, const Parameters& params,
                                            const TensorMap& q_map, const TensorMap& dout_map) {
  const uint32_t place = ColumnSplit<Config>::place(), token = params.query_begin + place;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    storage.init();
  }
  wait_for_primary_grid(params.has_dependent != 0);
  const int32_t* const entries = stored_entries(params, place);
  const SparseQuery<Config::kTileKeys> query(params, token, min(entries[0], entries[1]));
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Config::kWarpgroup, 0);
  if (warpgroup == Config::kConsumers) {
    warpgroup_reg_dealloc<Config::kProducerRegisters>();
    DqDkvProducer<Config> producer{storage, params, query};
    producer.load_heads(q_map, dout_map);
    producer.run(place);
  } else if (warpgroup == 0) {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_dq_dkv<Config, Element, 0>(storage, params, query);
  } else {
    warpgroup_reg_alloc<Config::kConsumerRegisters>();
    consume_dq_dkv<Config, Element, 1>(storage, params, query);
  }
}

}  // namespace cupymla::sparse_mla_bwd
