// After the last block: row sums of both consumers, statistics, and the output by way of shared memory.
#pragma once

#include "../../common/tma.cuh"
#include "consumer.cuh"

namespace cupymla::sparse_mla_fwd {

// Writes lse and max_logits, and gives the factor that turns the accumulated output into the result.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void finish_rows(Consumer<Config, Element, kWho>& consumer, const Query<Config>& query,
                                            float (&factor)[2]) {
  auto& storage = consumer.storage;
  const Parameters& params = consumer.params;
  const int quad_lane = consumer.lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float own = quad_sum(consumer.row_sum[r]);
    if (quad_lane == 0) storage.row_sum[kWho][consumer.row + 8 * r] = own;
  }
  named_barrier_sync(kRowSumsReady, Config::kConsumers * Config::kWarpgroup);

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = consumer.row + 8 * r;
    const int head = query.first_head + row;
    const float sum = storage.row_sum[0][row] + storage.row_sum[1][row];
    const float maximum = consumer.row_max[r];
    const bool empty = maximum == negative_infinity();
    float total = sum;
    if (params.attn_sink != nullptr && head < params.h_q) {
      total += exp2f(params.attn_sink[head * params.attn_sink_head] * kLog2e - maximum);
    }
    factor[r] = empty ? 0.f : 1.f / total;
    if (kWho == 0 && quad_lane == 0 && head < params.h_q) {
      const int64_t batch = query.batch, token = query.query;
      params.max_logits[batch * params.max_logits_batch + token * params.max_logits_query +
                        head * params.max_logits_head] = maximum * kLn2;
      params.lse[batch * params.lse_batch + token * params.lse_query + head * params.lse_head] =
          empty ? positive_infinity() : (maximum + log2f(sum)) * params.lse_unit;
    }
  }
}

// The output goes through the shared memory of Q, which both consumers are done with: a tile of 64 heads x 64 columns
// each, in the swizzled layout the tensor map expects. Heads past h_q are cut off by the map.
template <typename Config, typename Element, int kWho>
__device__ __forceinline__ void store_output(Consumer<Config, Element, kWho>& consumer, const Query<Config>& query,
                                             const TensorMap& out_map) {
  float factor[2];
  finish_rows(consumer, query, factor);

  auto& storage = consumer.storage;
  const uint32_t matrix_row = consumer.warp * 16 + consumer.lane % 16;
  auto& output = consumer.output;
#pragma unroll
  for (int step = 0; step < Config::kDV / 2 / 16; ++step) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      packed[j] = pack_pair<Element>(output[step * 8 + j * 2] * factor[j % 2],
                                     output[step * 8 + j * 2 + 1] * factor[j % 2]);
    }
    const uint32_t base = smem_address(storage.q[kWho * Config::kHalfTiles + step / 4]);
    store_matrix_x4(base + swizzle_128(matrix_row, (step % 4) * 2 + consumer.lane / 16), packed[0], packed[1],
                    packed[2], packed[3]);
  }
  fence_async_shared();
  named_barrier_sync(kKeysRead + kWho, Config::kWarpgroup);
  if (threadIdx.x % Config::kWarpgroup == 0) {
#pragma unroll
    for (int tile = 0; tile < Config::kHalfTiles; ++tile) {
      const int column_tile = kWho * Config::kHalfTiles + tile;
      tma_store_4d(out_map, storage.q[column_tile], column_tile * Config::kTileColumns, query.first_head, query.query,
                   query.batch);
    }
    tma_store_commit();
    tma_store_wait();
  }
}

}  // namespace cupymla::sparse_mla_fwd
