#pragma once

#include "columns_stage.cuh"
#include "weights_stage.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kRing = 4;  // stretches

struct RingBarriers {
  Mbarrier ring_free[kRing];  // of `weights`
  Mbarrier stored[kRing];     // of the loading CTA
  Mbarrier all_free[2];
};

template <typename Weights, typename Columns>
struct alignas(1024) HalvesStorage {
  union {
    WeightsStorage<Weights> weights;
    ColumnsStorage<Columns> columns;
  };
  RingBarriers ring;
  int32_t slots;
};

struct RingBlocks {
  RingBarriers& ring;
  uint8_t* tiles;  // of the ring, of this group
  uint8_t* here = nullptr;
  int32_t stretch = 0;

  __device__ __forceinline__ void begin(int32_t next) {
    stretch = next;
    cluster_wait_at(ring.ring_free[stretch % kRing], (stretch / kRing & 1) ^ 1);
    here = tiles + stretch % kRing * (2 * kWeightBlockBytes);
  }
  template <int kBlock>
  __device__ __forceinline__ void begin_block() {}
  template <int kBlock>
  __device__ __forceinline__ void put(uint32_t to, const uint4& chunk) const {
    store_uint4(here + kBlock * kWeightBlockBytes + to, chunk);
  }
  __device__ __forceinline__ void end() const {
    cluster_arrive_at(cluster_address(smem_address(&ring.stored[stretch % kRing]), 2));
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
    for (int i = 0; i < kRing; ++i) {
      storage.ring.ring_free[i].init(1);
      storage.ring.stored[i].init(2 * 128);
    }
    for (Mbarrier& of : storage.ring.all_free) of.init(3);
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(dout_map);
    if (rank < 2) {
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
  uint8_t* const tiles = params.weights + static_cast<int64_t>(place % 64) * (kRing * 2 * kWeightBlockBytes);
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
          .run(query, RingBlocks{storage.ring, tiles + rank * (2 * kWeightTileBytes)});
    } else {
      registers_take<Weights::kConsumerRegisters>();
      WeightsConsumer<Weights, Element, 1>(storage.weights, params, first_head)
          .run(query, RingBlocks{storage.ring, tiles + rank * (2 * kWeightTileBytes)});
    }
  } else {
    const SparseQuery<Columns::kSlots> query(params, token, slots);
    if (warpgroup == Columns::kConsumers) {
      registers_give_back<Columns::kProducerRegisters>();
      ColumnsProducer<Columns> producer{storage.columns, params, query};
      producer.load_heads(q_map, dout_map);
      if (rank == 2) {
        producer.run_ring(storage.ring, tiles, 1);
      } else {
        producer.run_ring(storage.ring, tiles, 0);
      }
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
