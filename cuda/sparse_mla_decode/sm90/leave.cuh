// The end of a row, of each kind of consumer: the whole result, or what a CTA leaves for the others of its cluster.
#pragma once

#include "config.cuh"

namespace cupymla::sparse_mla_decode {

template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void store_whole(
    sparse_mla_fwd::Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer, const sparse_mla_fwd::Query& query) {
  sparse_mla_fwd::store_output(consumer, query);
}

template <typename Config, typename Element, bool kAnyScale>
__device__ __forceinline__ void store_whole(sparse_mla_fwd::Scores<Config, Element, kAnyScale>& scores,
                                            const sparse_mla_fwd::Query& query) {
  scores.store_result(query);
}

template <typename Config, typename Element>
__device__ __forceinline__ void store_whole(sparse_mla_fwd::Values<Config, Element>& values,
                                            const sparse_mla_fwd::Query& query) {
  values.store_result(query);
}

// To exchange statistics, a consumer waits for all threads of the other one, which have done all products. Before what
// is left comes over Q and the keys, its own threads have to as well.
template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void leave(
    sparse_mla_fwd::Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer) {
  sparse_mla_fwd::RowStatistics rows[2];
  sparse_mla_fwd::join_statistics(consumer, rows);
  consumer.storage.statistics_ready[kWarpgroupIdx].wait(consumer.q_parity);
  auto& left = sparse_mla_fwd::leavings(consumer.storage);
  const int quad_lane = consumer.lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = consumer.row + 8 * r;
    if (kWarpgroupIdx == 0 && quad_lane == 0) left.statistics[row] = sparse_mla_fwd::packed(rows[r]);
    float* line = left.output[row] + kWarpgroupIdx * Config::kDV / 2 + quad_lane * 2;
#pragma unroll
    for (int j = 0; j < Config::kDV / 2 / 8; ++j) {
      const int i = j * 4 + 2 * r;
      *reinterpret_cast<float2*>(line + j * 8) = make_float2(consumer.output[i], consumer.output[i + 1]);
    }
  }
}

template <typename Config, typename Element, bool kAnyScale>
__device__ __forceinline__ void leave(sparse_mla_fwd::Scores<Config, Element, kAnyScale>& scores) {
  scores.leave();
}

template <typename Config, typename Element>
__device__ __forceinline__ void leave(sparse_mla_fwd::Values<Config, Element>& values) {
  values.leave();
}

}  // namespace cupymla::sparse_mla_decode
