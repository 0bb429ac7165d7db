// Where the CTAs of a cluster share the slots of a query, which CTAs of few heads do: their outputs and statistics
// become one, each brought to the largest base. A CTA leaves what it has in its own shared memory and then finishes
// some of the heads, reading what the others left. Sums run over the CTAs in their order, so the result is the same
// every time.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/cluster_load.cuh"
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

// Of a CTA whose slots all score -inf, or that has none, the output is 0 times what its values are.
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

// Every so many of the heads, from this CTA's first on: of each kColumns columns to a thread, kBatch parts read at once,
// and those at the same time as the statistics, as one after another they would take a way to another SM each. With more
// at once consumers spill.
template <int kColumns, int kBatch, typename Element, typename Config>
__device__ __forceinline__ void finish_rows(const Leavings<Config>& left, const Parameters& params, const Query& query,
                                            const Share<Config>& share, int first, int step, int column) {
  using Values = cuda::std::conditional_t<kColumns == 2, float2, float4>;
  static_assert(sizeof(Values) == kColumns * sizeof(float));
  static_assert(Config::kMaxCluster <= 32, "a lane for each part's statistics");
  const uint32_t lane_part = min(threadIdx.x % 32, share.parts - 1);
  for (int row = first; row < Config::kHeads; row += step) {
    const int head = share.first_head + row;
    if (head >= params.h_q) break;
    const RowStatistics own = read_statistics(left.statistics[row], lane_part);
    const uint32_t address = smem_address(&left.output[row][column]);
    Values values[kBatch];
    const auto read = [&](uint32_t part) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (part + i < share.parts) values[i] = cluster_load<Values>(cluster_address(address, part + i));
      }
    };
    read(0);
    RowStatistics merged = join_bases_of_warp(own);
    const float own_weight = part_weight(own.base, merged.base);
    float sum[kColumns] = {};
    for (uint32_t part = 0; part < share.parts; part += kBatch) {
      if (part != 0) read(part);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (part + i < share.parts) {
          const float weight = __shfl_sync(0xffffffffu, own_weight, part + i);
          merged.sum = fmaf(weight, __shfl_sync(0xffffffffu, own.sum, part + i), merged.sum);
          const auto* numbers = reinterpret_cast<const float*>(&values[i]);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sum[c] = fmaf(weight, numbers[c], sum[c]);
        }
      }
    }
    const float factor = output_factor(params, head, merged, 0.f);
    if (column == 0) store_statistics(params, query, head, merged);
    uint8_t* line = params.out + query.batch * params.out_batch_bytes + query.query * params.out_query_bytes +
                    head * params.out_head_bytes + column * 2;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      reinterpret_cast<uint32_t*>(line)[c / 2] = pack_pair<Element>(sum[c] * factor, sum[c + 1] * factor);
    }
  }
}

// What the threads of consumer `who` do once they have left theirs: they finish every so many of the heads, both
// consumers together where a CTA has so few that only one of them would have any.
template <typename Element, typename Config>
__device__ __forceinline__ void merge_parts(Storage<Config>& storage, const Parameters& params, const Query& query,
                                            const Share<Config>& share, int who) {
  static_assert(Config::kDV == 4 * Config::kWarpgroup, "a row at a time");
  cluster_arrive();
  cluster_wait();

  // The others' lie at the same place in their shared memory.
  const auto& left = leavings(storage);
  const int thread = threadIdx.x % Config::kWarpgroup, parts = share.parts;
  if (parts >= Config::kHeads) {
    finish_rows<2, 8, Element>(left, params, query, share, share.part, parts,
                                                 (who * Config::kWarpgroup + thread) * 2);
  } else {
    finish_rows<4, 4, Element>(left, params, query, share, share.part + who * parts, Config::kConsumers * parts,
                               thread * 4);
  }
  // Nobody leaves while another may still read what it left.
  cluster_arrive();
  cluster_wait();
}

}  // namespace cupymla::sparse_mla_fwd
