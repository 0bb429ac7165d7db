// Where the CTAs of a cluster share the entries of a query, which the small-head variant does: their outputs and
// statistics become one, each brought to the largest base. A CTA leaves what it has in its own shared memory and then
// finishes some of the heads, reading what the others left. Sums run over the CTAs in their order, so the result is the
// same every time.
#pragma once

#include "../../common/cluster.cuh"
#include "epilogue.cuh"

namespace cupymla::sparse_mla_fwd {

// What a CTA leaves for the others, over its key tiles, which are done with: they come first in `Storage`.
template <typename Config>
struct alignas(16) Leavings {
  // Eight rows of a quad's 32 bytes lie in banks of their own.
  static constexpr int kRowFloats = Config::kDV + 8;
  float output[Config::kHeads][kRowFloats];
  float4 statistics[Config::kHeads];
};

template <typename Config>
__device__ __forceinline__ Leavings<Config>& leavings(Storage<Config>& storage) {
  static_assert(sizeof(Leavings<Config>) <= Storage<Config>::kKeyBytes);
  return *reinterpret_cast<Leavings<Config>*>(&storage);
}

// Of a CTA whose entries all score -inf, or that has none, the output is 0 times what its values are.
__device__ __forceinline__ float part_weight(float part_base, float base) { return base_factor(part_base, base); }

// Base, maximum and occupied over the lanes of a warp; no sum yet.
__device__ __forceinline__ RowStatistics join_bases_of_warp(const RowStatistics& lanes) {
  RowStatistics joined = lanes;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    joined.base = max_nan(joined.base, __shfl_xor_sync(0xffffffffu, joined.base, distance));
    joined.maximum = max_nan(joined.maximum, __shfl_xor_sync(0xffffffffu, joined.maximum, distance));
  }
  joined.occupied = __any_sync(0xffffffffu, lanes.occupied);
  joined.sum = 0.f;
  return joined;
}

// Four columns of a head, of all parts in their order, each brought to the largest base. Lane i of the warp has the
// statistics of part i, lanes past the last one that one's; `load(i)` gives part i's columns, kBatch of which are asked
// for at once. `merged` are the statistics of all.
template <int kBatch, typename Load>
__device__ __forceinline__ float4 add_parts(const RowStatistics& own, uint32_t parts, RowStatistics& merged,
                                            const Load& load) {
  float4 values[kBatch];
  const auto ask = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < parts) values[i] = load(first + i);
    }
  };
  ask(0);
  merged = join_bases_of_warp(own);
  const float own_weight = part_weight(own.base, merged.base);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (uint32_t first = 0; first < parts; first += kBatch) {
    if (first > 0) ask(first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < parts) {
        const float weight = __shfl_sync(0xffffffffu, own_weight, first + i);
        merged.sum = fmaf(weight, __shfl_sync(0xffffffffu, own.sum, first + i), merged.sum);
        sum.x = fmaf(weight, values[i].x, sum.x);
        sum.y = fmaf(weight, values[i].y, sum.y);
        sum.z = fmaf(weight, values[i].z, sum.z);
        sum.w = fmaf(weight, values[i].w, sum.w);
      }
    }
  }
  return sum;
}

// Writes four columns of a head's result, and by the thread of the first ones its statistics.
template <typename Element, typename Parameters>
__device__ __forceinline__ void store_merged(const Parameters& params, const Query& query, int32_t head, int column,
                                             const RowStatistics& merged, const float4& sum) {
  const float factor = output_factor(params, head, merged, 0.f);
  if (column == 0) store_statistics(params, query, head, merged);
  uint8_t* line = params.out + query.batch * params.out_batch_bytes + query.query * params.out_query_bytes +
                  head * params.out_head_bytes + column * 2;
  *reinterpret_cast<uint2*>(line) = make_uint2(pack_pair<Element>(sum.x * factor, sum.y * factor),
                                               pack_pair<Element>(sum.z * factor, sum.w * factor));
}

// What the threads of consumer `warpgroup_idx` do once they have left theirs: they finish every so many of the heads.
template <typename Element, typename Config>
__device__ __forceinline__ void merge_parts(Storage<Config>& storage, const Parameters& params, const Query& query,
                                            const WorkAssignment<Config>& work, int warpgroup_idx) {
  constexpr int kColumns = 4;  // of a thread
  constexpr int kRowThreads = Config::kDV / kColumns;
  static_assert(kRowThreads == Config::kWarpgroup, "each consumer finishes a row at a time");
  constexpr int kBatch = 4;  // with more, consumers spill

  cluster_arrive();
  cluster_wait();

  // The others' lie at the same place in their shared memory.
  const auto& left = leavings(storage);
  const int column = threadIdx.x % Config::kWarpgroup * kColumns;
  static_assert(Config::kMaxCluster <= 32, "a lane for each part's statistics");
  const uint32_t lane_part = min(threadIdx.x % 32, work.parts - 1);
  for (int row = work.part + warpgroup_idx * work.parts; row < Config::kHeads; row += Config::kConsumers * work.parts) {
    const int head = work.first_head + row;
    if (head >= params.h_q) break;

    // A lane for each part: read one after another their statistics would take a way to another SM each.
    const RowStatistics own = read_statistics(left.statistics[row], work.rank_of(lane_part));
    const uint32_t address = smem_address(&left.output[row][column]);
    RowStatistics merged;
    const float4 sum = add_parts<kBatch>(own, work.parts, merged, [&](uint32_t part) {
      return cluster_load_float4(cluster_address(address, work.rank_of(part)));
    });
    store_merged<Element>(params, query, head, column, merged, sum);
  }
  // Nobody leaves while another may still read what it left.
  cluster_arrive();
  cluster_wait();
}

}  // namespace cupymla::sparse_mla_fwd
