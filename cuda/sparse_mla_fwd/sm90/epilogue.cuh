// After the last block: row statistics of both consumers, and the output from registers to global memory.
#pragma once

#include "../statistics.cuh"
#include "consumer.cuh"

namespace cupymla::sparse_mla_fwd {

// First consumer 1's row statistics reach consumer 0, then the other way round.
template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void exchange_statistics(Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer) {
  auto& ready = consumer.storage.statistics_ready;
  if constexpr (kWarpgroupIdx == 0) {
    ready[1].wait(consumer.q_parity);
    ready[0].arrive();
  } else {
    ready[1].arrive();
    ready[0].wait(consumer.q_parity);
  }
}

// Statistics of this thread's two rows over both consumers' blocks. Each consumer has then finished all its products.
template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void join_statistics(Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer,
                                                RowStatistics (&joined)[2]) {
  auto& storage = consumer.storage;
  const int quad_lane = consumer.lane % 4;
  auto& row_max = storage.row_max[consumer.q_parity];
  auto& row_sum = storage.row_sum[consumer.q_parity];
  float own_sum[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    own_sum[r] = quad_sum(consumer.row_sum[r]);
    if (quad_lane == 0) {
      row_sum[kWarpgroupIdx][consumer.row + 8 * r] = own_sum[r];
      row_max[kWarpgroupIdx][consumer.row + 8 * r] = consumer.row_max[r];
    }
  }
  auto& occupied = storage.occupied[consumer.q_parity];
  if (consumer.warp == 0 && consumer.lane == 0) occupied[kWarpgroupIdx] = consumer.occupied;
  exchange_statistics(consumer);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = consumer.row + 8 * r;
    joined[r] = {consumer.base[r], max_nan(consumer.row_max[r], row_max[1 - kWarpgroupIdx][row]),
                 own_sum[r] + row_sum[1 - kWarpgroupIdx][row], consumer.occupied || occupied[1 - kWarpgroupIdx]};
  }
}

// Each thread has two neighbouring columns of every eight in its rows. The four lanes of a row exchange them so that
// each stores sixteen bytes, and the quad 64 bytes side by side.
template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void store_output(Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer,
                                             const Query& query) {
  RowStatistics rows[2];
  join_statistics(consumer, rows);

  const Parameters& params = consumer.params;
  auto& output = consumer.output;
  const int quad_lane = consumer.lane % 4;
  uint8_t* base = params.out + query.batch * params.out_batch_bytes + query.query * params.out_query_bytes +
                  kWarpgroupIdx * Config::kDV + quad_lane * 16;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = consumer.first_head + consumer.row + 8 * r;
    const float factor = output_factor(params, head, rows[r], 0.f);
    if (kWarpgroupIdx == 0 && quad_lane == 0 && head < params.h_q) store_statistics(params, query, head, rows[r]);
    uint8_t* line = base + head * params.out_head_bytes;
#pragma unroll
    for (int quad = 0; quad < Config::kDV / 2 / 32; ++quad) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = (quad * 4 + j) * 4 + 2 * r;
        words[j] = pack_pair<Element>(output[i] * factor, output[i + 1] * factor);
      }
      quad_transpose(words, quad_lane);
      if (head < params.h_q) {
        *reinterpret_cast<uint4*>(line + quad * 64) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace cupymla::sparse_mla_fwd
