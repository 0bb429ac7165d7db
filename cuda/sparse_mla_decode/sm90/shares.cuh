// Where several clusters share the entries of a row: each has a share of them, writes what it has of the output to
// global memory, relative to its own base, and sparse_mla_decode_merge.cu puts the shares together. In y a grid has the
// shares of a row; there is one where a cluster has all entries.
#pragma once

#include "../../common/grid_dependency.cuh"
#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_decode {

// Which of how many parts of a row's entries a CTA has.
template <typename Work>
__device__ __forceinline__ uint32_t part_of_row(const Work& work) {
  return blockIdx.y * work.parts + work.part;
}

template <typename Work>
__device__ __forceinline__ uint32_t parts_of_row(const Work& work) {
  return gridDim.y * work.parts;
}

// Where a head of a row has its place in a share.
__device__ __forceinline__ int64_t share_place(const Parameters& params, uint32_t share, uint32_t token, int32_t head) {
  return share * params.share_heads + static_cast<int64_t>(token) * params.h_q + head;
}

// With many heads of a CTA, a share has a head's columns in the order in which threads have them, two of every eight:
// four stand side by side, so that a thread stores sixteen bytes at once. The first two of those at a place, a multiple
// of 4; the others are eight further.
__device__ __forceinline__ uint32_t column_of_four(uint32_t place) { return place / 16 * 16 + place / 4 % 4 * 2; }

// Where a CTA leaves its share.
struct PartialResult {
  const Parameters& params;
  const uint32_t token;

  __device__ __forceinline__ float* line(int32_t head) const {
    return params.share_outputs + share_place(params, blockIdx.y, token, head) * 512;
  }

  __device__ __forceinline__ void store(int32_t head, const sparse_mla_fwd::RowStatistics& row) const {
    params.share_statistics[share_place(params, blockIdx.y, token, head)] = sparse_mla_fwd::packed(row);
  }
};

template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
__device__ __forceinline__ void store_share(
    sparse_mla_fwd::Consumer<Config, Element, kWarpgroupIdx, kAnyScale>& consumer, const PartialResult& share) {
  sparse_mla_fwd::RowStatistics rows[2];
  sparse_mla_fwd::join_statistics(consumer, rows);
  const int quad_lane = consumer.lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t head = consumer.first_head + consumer.row + 8 * r;
    if (head >= share.params.h_q) continue;
    if (kWarpgroupIdx == 0 && quad_lane == 0) share.store(head, rows[r]);
    float* line = share.line(head) + kWarpgroupIdx * Config::kDV / 2 + quad_lane * 4;
#pragma unroll
    for (int j = 0; j < Config::kDV / 2 / 8; j += 2) {
      const int i = j * 4 + 2 * r;
      *reinterpret_cast<float4*>(line + j * 8) = make_float4(consumer.output[i], consumer.output[i + 1],
                                                             consumer.output[i + 4], consumer.output[i + 5]);
    }
  }
}

template <typename Config, typename Element, bool kAnyScale>
__device__ __forceinline__ void store_share(sparse_mla_fwd::Scores<Config, Element, kAnyScale>& scores,
                                            const PartialResult& share) {
  const sparse_mla_fwd::RowStatistics joined = scores.join_statistics();
  scores.wait_for_handover();
  scores.hand_over(true);
  const int32_t head = scores.first_head + scores.row;
  if (scores.has_heads && scores.lane % 4 == 0 && head < share.params.h_q) share.store(head, joined);
}

template <typename Config, typename Element>
__device__ __forceinline__ void store_share(sparse_mla_fwd::Values<Config, Element>& values,
                                            const PartialResult& share) {
  values.hand_back();
#pragma unroll
  for (int j = 0; j < Config::kHeads / 4; ++j) {
    const int32_t head = values.first_head + values.column_of(j);
    if (head >= share.params.h_q) continue;
    float* line = share.line(head) + values.warp * 16 + values.lane / 4;
#pragma unroll
    for (int tile = 0; tile < Config::kValueTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        line[tile * Config::kTileColumns + half * 8] = values.output[tile][j / 2 * 4 + half * 2 + j % 2];
      }
    }
  }
}

}  // namespace cupymla::sparse_mla_decode
