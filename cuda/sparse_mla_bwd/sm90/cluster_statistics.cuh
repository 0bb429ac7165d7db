// Of a 2-CTA cluster, before a head block's first block: delta and what lse and the sink make of the softmax. After its
// last: dQ, and what the query adds to the sink's gradient.
#pragma once

#include "head_statistics.cuh"
#include "meet_consumers.cuh"
#include "cluster_gradients.cuh"
#include "query_gradient_columns.cuh"

namespace cupymla::sparse_mla_bwd {

// Two consumer threads to a head, each with every other 16 bytes of its CTA's value columns. dO is in shared memory.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void make_statistics(const ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer,
                                                const QueryPosition& query, int32_t head_block) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  uint32_t thread = threadIdx.x;
  make_opaque(thread);  // or what follows from it is kept, and spilled, from head block to head block
  const int place = thread / 2, part = thread % 2;
  const int32_t head = head_of_place<Config>(head_block, place);
  const int own = place / (2 * Config::kHeadTile) * Config::kHeadTile + place % Config::kHeadTile;
  const bool is_own = place / Config::kHeadTile % 2 == 0;
  if (thread == 0) storage.delta_in.arrive_and_expect(sizeof(storage.other_delta));
  const bool exists = head < params.h_q;
  const uint8_t* out = head_out(params, query, head) + cluster_rank() * (Config::kColumns * 2);
  if (exists) prefetch_head_out<2, Config::kColumns>(out, part);
  storage.heads_full.wait(head_block & 1);
  float delta = 0.f;
  if (exists) delta = delta_part<Element, 2, Config::kColumns, 8>(out, storage.dout, place, part);
  // TMA is the next to write dO. Without a block no other fence comes before that.
  fence_async_shared();
  delta += __shfl_xor_sync(0xffffffffu, delta, 1);
  if (is_own) {
    HeadSoftmax softmax;
    if (exists) softmax = head_softmax(params, query, head);
    storage.delta_in.wait(head_block & 1);
    if (part == 0) store_statistics(storage, own, softmax, delta + storage.other_delta[own]);
  } else if (part == 0) {
    cluster_store_async_float(consumer.at_other(smem_address(&storage.other_delta[own])), delta,
                              consumer.at_other(smem_address(&storage.delta_in)));
  }
  meet_consumers(storage, 0);
}

// What the query adds to d_sink, by a thread for each own head; nothing where no entry was valid.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void store_sink_terms(const ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer,
                                                 const QueryPosition& query, int32_t head_block) {
  const Parameters& params = consumer.params;
  int own = threadIdx.x;
  make_opaque(own);  // or what follows from it is worked out, and spilled, before the first block
  if (params.sink_terms == nullptr || own >= Config::kOwnHeads) return;
  const int32_t head = head_of_place<Config>(head_block, place_of_own<Config>(own));
  if (head < params.h_q) store_sink_term(params, query, head, consumer.occupied(), consumer.storage.delta[own]);
}

// Writes 64 heads x 32 columns.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void store_columns(const ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer,
                                              uint8_t* query_start, int32_t head_block, int32_t column,
                                              const float* values) {
  const int quad_lane = consumer.fresh_thread() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int place = kWarpgroupIdx * 2 * Config::kHeadTile + consumer.row() + 8 * r;
    const int32_t head = head_of_place<Config>(head_block, place);
    uint8_t* to = query_start + head * consumer.params.dq_head_bytes + column * 2;
    store_query_gradient_columns<Element>(to, head < consumer.params.h_q, values + 2 * r, quad_lane);
  }
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void store_query_gradient(const ClusterConsumer<Config, Element, kWarpgroupIdx>& consumer,
                                                     const QueryPosition& query, int32_t head_block) {
  const Parameters& params = consumer.params;
  uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
  const int32_t rank = static_cast<int32_t>(cluster_rank());
#pragma unroll
  for (int part = 0; part < Config::kColumns / 32; ++part) {
    store_columns(consumer, start, head_block, rank * Config::kColumns + part * 32, consumer.dq_wide + part * 16);
  }
  if constexpr (Config::kHasRope) {
    store_columns(consumer, start, head_block, Config::kDV + rank * Config::kRopeColumns, consumer.dq_narrow);
  }
}

}  // namespace cupymla::sparse_mla_bwd
