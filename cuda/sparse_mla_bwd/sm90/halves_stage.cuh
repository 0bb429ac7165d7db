#pragma once

#include "columns_stage.cuh"
#include "weights_stage.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Weights, typename Columns>
struct alignas(1024) HalvesStorage {
  union {
    WeightsStorage<Weights> weights;
    ColumnsStorage<Columns> columns;
  };
  Mbarrier room[2][2];
  int32_t slots;
};

template <typename Weights, typename Columns>
struct GivenBlocks {
  HalvesStorage<Weights, Columns>& storage;
  int group, who;
  uint32_t to[3], full[3];
  uint32_t parity = 0;

  __device__ __forceinline__ GivenBlocks(HalvesStorage<Weights, Columns>& storage, int group, int who)
      : storage(storage), group(group), who(who) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      to[i] = cluster_address(smem_address(storage.columns.weights[0][group][0]), 2 + i);
      full[i] = cluster_address(smem_address(&storage.columns.full[0]), 2 + i);
    }
  }
  __device__ __forceinline__ void begin(int32_t stretch) { parity = stretch / 2 & 1; }
  template <int kBlock>
  __device__ __forceinline__ void begin_block() {
    cluster_wait_at(storage.room[who][kBlock], parity);
  }
  template <int kBlock>
  __device__ __forceinline__ void put(uint32_t place, const uint4& chunk) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      cluster_store_async_float4(to[i] + kBlock * static_cast<uint32_t>(sizeof(storage.columns.weights[0])) + place,
                                 __uint_as_float(chunk.x), __uint_as_float(chunk.y), __uint_as_float(chunk.z),
                                 __uint_as_float(chunk.w), full[i] + kBlock * 8);
    }
  }
};

template <typename Weights, typename Columns, typename Element>
__device__ __forceinline__ void make_halves(HalvesStorage<Weights, Columns>& storage, const Parameters& params,
                                            const TensorMap& q_map, const TensorMap& dout_map) {
  constexpr uint32_t kCtas = 2 + Columns::kShares;
  static_assert(kCtas == 5);
  const uint32_t place = blockIdx.x / kCtas, rank = blockIdx.x % kCtas, token = params.query_begin + place;
  if (token >= params.query_end) return;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    if (rank < 2) {
      for (auto& of : storage.room) {
        for (Mbarrier& room : of) room.init(Columns::kShares);
      }
      storage.weights.init();
      storage.weights.occupied = 0;
    } else {
      storage.columns.init();
    }
  }
  wait_for_grid_ahead(params.followed != 0);
  if (rank == 0 && threadIdx.x == 0) {
    storage.slots = SparseQuery<Weights::kSlots>::read_slots(params, QueryPosition(params, token));
  }
  cluster_arrive();
  cluster_wait();
  const int32_t slots = cluster_load_int32(cluster_address(smem_address(&storage.slots), 0));
  cluster_arrive();
  cluster_wait();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / Columns::kWarpgroup, 0);
  if (rank < 2) {
    const SparseQuery<Weights::kSlots> query(params, token, slots);
    const int32_t first_head = rank * Weights::kHeads;
    if (warpgroup == Weights::kConsumers) {
      registers_give_back<Weights::kProducerRegisters>();
      WeightsProducer<Weights> producer{storage.weights, params, query};
      producer.load_heads(first_head, q_map, dout_map);
      producer.run();
      producer.store_sink_terms(first_head);
    } else if (warpgroup == 0) {
      registers_take<Weights::kConsumerRegisters>();
      WeightsConsumer<Weights, Element, 0>(storage.weights, params, first_head)
          .run(query, GivenBlocks<Weights, Columns>(storage, rank, 0));
    } else {
      registers_take<Weights::kConsumerRegisters>();
      WeightsConsumer<Weights, Element, 1>(storage.weights, params, first_head)
          .run(query, GivenBlocks<Weights, Columns>(storage, rank, 1));
    }
  } else {
    const SparseQuery<Columns::kSlots> query(params, token, slots);
    if (warpgroup == Columns::kConsumers) {
      registers_give_back<Columns::kProducerRegisters>();
      ColumnsProducer<Columns> producer{storage.columns, params, query};
      producer.load_heads(q_map, dout_map);
      producer.run(place, smem_address(&storage.room[0][0]));
    } else if (warpgroup == 0) {
      registers_take<Columns::kConsumerRegisters>();
      consume_columns<Columns, Element, 0>(storage.columns, params, query);
    } else {
      registers_take<Columns::kConsumerRegisters>();
      consume_columns<Columns, Element, 1>(storage.columns, params, query);
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
