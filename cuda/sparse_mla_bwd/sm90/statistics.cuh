// Before a pass's first block: delta and what lse and the sink make of the softmax. After its last: dQ, and what the
// query adds to the sink's gradient.
#pragma once

#include "../../common/dot.cuh"
#include "../../common/log2_lse.cuh"
#include "../sink.cuh"
#include "gradients.cuh"

namespace cupymla::sparse_mla_bwd {

// Four consumer threads to a head, each with every fourth 16 bytes of its channels. dO is in shared memory.
template <typename Config, typename Element>
__device__ __forceinline__ void make_statistics(Storage<Config>& storage, const Parameters& params,
                                                const QueryPosition& query, int32_t first_head) {
  constexpr int kChunks = Config::kDV / 8 / 4;
  const int row = threadIdx.x / 4;
  const int quad_lane = threadIdx.x % 4;
  const int32_t head = first_head + row;
  const int64_t batch = query.batch, token = query.query;
  Log2Lse lse{positive_infinity(), 1.f};
  float delta = 0.f, share = 1.f;
  if (head < params.h_q) {
    const uint8_t* out = params.out + batch * params.out_batch_bytes + token * params.out_query_bytes +
                         head * params.out_head_bytes;
#pragma unroll 8
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = i * 4 + quad_lane;
      const uint4 left = __ldg(reinterpret_cast<const uint4*>(out) + chunk);
      const uint4 right = *reinterpret_cast<const uint4*>(storage.dout[chunk / 8] + swizzle_128(row, chunk % 8));
      delta += dot_eight<Element>(left, right);
    }
    const float given = read_lse(params, query, head);
    lse = log2_lse(given, params.unit, params.unit_rest);
    share = share_beside_sink(params, head, given);
  }
  // TMA is the next to write dO. Without a block no other fence comes before that.
  fence_async_shared();
  delta = quad_sum(delta);
  if (quad_lane == 0) {
    storage.lse[row] = lse.rounded;
    storage.factor[row] = lse.factor;
    storage.share[row] = share * lse.factor;
    storage.delta[row] = delta;
  }
  named_barrier_sync(kStatisticsOut, Config::kConsumerThreads);
}

// What this query adds to d_sink, by consumer 0's first 64 threads; nothing where no slot was valid.
template <typename Config, typename Element>
__device__ __forceinline__ void store_sink_terms(const Consumer<Config, Element, 0>& consumer,
                                                 const QueryPosition& query, int32_t first_head) {
  const Parameters& params = consumer.params;
  const int row = threadIdx.x;
  const int32_t head = first_head + row;
  if (params.sink_terms == nullptr || row >= Config::kHeads || head >= params.h_q) return;
  store_sink_term(params, query, head, consumer.occupied, consumer.storage.delta[row]);
}

// Writes 64 heads x 32 columns. Each thread has two neighbouring columns of every eight in its rows; the four lanes of
// a row exchange them so that each stores sixteen bytes, and the quad 64 bytes side by side.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void store_columns(const Consumer<Config, Element, kWho>& consumer, uint8_t* query_start,
                                              int32_t first_head, int32_t column, const float* values) {
  const int quad_lane = consumer.lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t head = first_head + consumer.row + 8 * r;
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack_pair<Element>(values[j * 4 + 2 * r], values[j * 4 + 2 * r + 1]);
    quad_transpose(words, quad_lane);
    if (head < consumer.params.h_q) {
      uint8_t* line = query_start + head * consumer.params.dq_head_bytes + column * 2 + quad_lane * 16;
      *reinterpret_cast<uint4*>(line) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void store_query_gradient(const Consumer<Config, Element, kWho>& consumer,
                                                     const QueryPosition& query, int32_t first_head) {
  const Parameters& params = consumer.params;
  uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
  constexpr int kColumns = Config::kDV / 2;
#pragma unroll
  for (int part = 0; part < kColumns / 32; ++part) {
    store_columns(consumer, start, first_head, kWho * kColumns + part * 32, consumer.dq_wide + part * 16);
  }
  if constexpr (Consumer<Config, Element, kWho>::kHasNarrow) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      store_columns(consumer, start, first_head, Config::kDV + part * 32, consumer.dq_narrow + part * 16);
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
