// Before a head block's first block: delta and what lse and the sink make of the softmax. After its last: dQ, and what
// the query adds to the sink's gradient.
#pragma once

#include "../../common/registers.cuh"
#include "gradients.cuh"
#include "head_statistics.cuh"
#include "meet_consumers.cuh"
#include "query_gradient_columns.cuh"

namespace cupymla::sparse_mla_bwd {

// Several queries: what one of them has that is not finite would reach the others, as zero times that. `non_finite` is
// set then. `finite`: NaN if there is such a number among those of this thread's row.
template <typename Config, typename Element>
__device__ __forceinline__ void look_for_non_finite_numbers(Storage<Config>& storage, int thread, float finite) {
  constexpr int kChunks = Config::kDQk / 8 / 4;
  const int row = thread / 4;
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * 4 + thread % 4;
    const uint4 q = *reinterpret_cast<const uint4*>(storage.q[chunk / 8] + swizzle_128(row, chunk % 8));
    finite += dot_eight<Element>(q, uint4{});
  }
  if (!(finite == 0.f)) atomicOr(&storage.non_finite, 1u);
}

// Clears all rows of Q and dO, and what P and dS are made with, but for one query, which has the head block.
template <typename Config>
__device__ __forceinline__ void clear_others(Storage<Config>& storage, int thread, int32_t own) {
  const int row = thread / 4;
  if (row / Config::kQueryHeads != own) {
    if (thread % 4 == 0) storage.share[row] = storage.delta[row] = 0.f;
    for (int chunk = thread % 4; chunk < Config::kDQk / 8; chunk += 4) {
      *reinterpret_cast<uint4*>(storage.q[chunk / 8] + swizzle_128(row, chunk % 8)) = uint4{};
      if (chunk < Config::kDV / 8) {
        *reinterpret_cast<uint4*>(storage.dout[chunk / 8] + swizzle_128(row, chunk % 8)) = uint4{};
      }
    }
  }
  fence_async_shared();
  storage.cleared.arrive();
  storage.cleared.wait(own & 1);
}

// Four consumer threads to a head, each with every fourth 16 bytes of its channels. dO is in shared memory.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void make_statistics(const Consumer<Config, Element, kWarpgroupIdx>& consumer,
                                                const QueryPosition& first) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  const int thread = static_cast<int>(numbered_thread(Config::kConsumerThreads));
  const int row = thread / 4, quad_lane = thread % 4;
  const int32_t head = consumer.first_head() + head_of_row<Config>(row);
  const QueryPosition query = query_of_row<Config>(first, row);
  HeadSoftmax softmax;
  float delta = 0.f;
  if (head < params.h_q && exists<Config>(params, query)) {
    delta = delta_part<Element, 4, Config::kDV, 8>(head_out(params, query, head), storage.dout, row, quad_lane);
    softmax = head_softmax(params, query, head);
  }
  if constexpr (Config::kQueries > 1) {
    const float finite = (delta + softmax.share * softmax.lse.factor) * 0.f;
    if (consumer.head_block() == 0) look_for_non_finite_numbers<Config, Element>(storage, thread, finite);
  }
  // TMA is the next to write dO. Without a block no other fence comes before that.
  fence_async_shared();
  delta = quad_sum(delta);
  if (quad_lane == 0) store_statistics(storage, row, softmax, delta);
  meet_consumers(storage, 0);
  if constexpr (Config::kQueries > 1) {
    if (consumer.head_block() == 0) storage.decided.arrive();
    if (storage.non_finite != 0) clear_others(storage, thread, consumer.head_block());
  }
}

// Whether a head block is for a query: where several are taken one by one, each has its own.
template <typename Config>
__device__ __forceinline__ bool has_head_block(const Storage<Config>& storage, int row, int32_t head_block) {
  return Config::kQueries == 1 || storage.non_finite == 0 || row / Config::kQueryHeads == head_block;
}

// What queries add to d_sink, by sixteen threads of each warp of consumer 0, for its rows; nothing where no entry of
// the query was valid.
template <typename Config, typename Element>
__device__ __forceinline__ void store_sink_terms(const Consumer<Config, Element, 0>& consumer,
                                                 const QueryPosition& first) {
  const Parameters& params = consumer.params;
  int row = consumer.warp() * 16 + consumer.lane();
  // Or what follows from it is worked out, and spilled, before the first block.
  make_opaque(row);
  const int32_t head = consumer.first_head() + head_of_row<Config>(row);
  const QueryPosition query = query_of_row<Config>(first, row);
  if (params.sink_terms == nullptr || consumer.lane() >= 16 || head >= params.h_q) return;
  if (!exists<Config>(params, query) || !has_head_block(consumer.storage, row, consumer.head_block())) return;
  store_sink_term(params, query, head, consumer.occupied, consumer.storage.delta[row]);
}

// Writes 64 heads x 32 columns.
template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void store_columns(const Consumer<Config, Element, kWarpgroupIdx>& consumer,
                                              uint8_t* query_start, int32_t first_head, bool there, int32_t column,
                                              const float* values) {
  const int quad_lane = consumer.lane() % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t head = first_head + head_of_row<Config>(consumer.row() + 8 * r);
    uint8_t* to = query_start + head * consumer.params.dq_head_bytes + column * 2;
    store_query_gradient_columns<Element>(to, there && head < consumer.params.h_q, values + 2 * r, quad_lane);
  }
}

template <typename Config, typename Element, int kWarpgroupIdx>
__device__ __forceinline__ void store_query_gradient(const Consumer<Config, Element, kWarpgroupIdx>& consumer,
                                                     const QueryPosition& first) {
  const Parameters& params = consumer.params;
  const int32_t first_head = consumer.first_head();
  const QueryPosition query = query_of_row<Config>(first, consumer.warp() * 16);
  const bool there = exists<Config>(params, query) &&
                     has_head_block(consumer.storage, consumer.warp() * 16, consumer.head_block());
  uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
  constexpr int kColumns = Config::kDV / 2;
#pragma unroll
  for (int part = 0; part < kColumns / 32; ++part) {
    store_columns(consumer, start, first_head, there, kWarpgroupIdx * kColumns + part * 32,
                  consumer.dq_wide + part * 16);
  }
  if constexpr (Consumer<Config, Element, kWarpgroupIdx>::kHasNarrow) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      store_columns(consumer, start, first_head, there, Config::kDV + part * 32, consumer.dq_narrow + part * 16);
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
