// Where the pairs of a cluster share the entries of a query: their outputs and statistics become one, each brought to
// the largest base. A CTA leaves what it has in its own shared memory and then finishes some of its heads, reading what
// the same CTA of the other pairs left. Sums run over the pairs in their order, so the result is the same every time.
#pragma once

#include "../../common/cluster.cuh"
#include "../softmax.cuh"
#include "../statistics.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_fwd {

// What a CTA leaves for the others, over P and the stages, which are done with.
template <typename Config>
struct alignas(16) Leavings {
  // Rows of eight neighbouring lanes lie in banks of their own.
  static constexpr int kRowFloats = Config::kDV + 4;
  float output[Config::kHeads][kRowFloats];
  float4 statistics[Config::kHeads];
};

template <typename Storage>
__device__ __forceinline__ Leavings<typename Storage::Config>& leavings(Storage& storage) {
  using Config = typename Storage::Config;
  static_assert(sizeof(Leavings<Config>) <= sizeof(storage.p) + sizeof(storage.stages));
  return *reinterpret_cast<Leavings<Config>*>(&storage.p);
}

// What the epilogue warpgroup does once everything is left: it finishes every so many of its CTA's heads, a row at a
// time.
template <typename Element, typename Storage, typename Config>
__device__ __forceinline__ void merge_parts(Storage& storage, const Parameters& params, const Work<Config>& work,
                                            const CtaPosition<Config>& cta) {
  constexpr int kColumns = 4;  // of a thread
  static_assert(Config::kDV / kColumns == Config::kEpilogueThreads);
  const auto& left = leavings(storage);
  const uint32_t column = threadIdx.x % Config::kEpilogueThreads * kColumns;
  for (uint32_t row = cta.part; row < static_cast<uint32_t>(Config::kHeads); row += cta.parts) {
    const int32_t head = work.first_head + static_cast<int32_t>(row);
    if (head >= params.h_q) break;

    RowStatistics merged = no_statistics();
    for (uint32_t part = 0; part < cta.parts; ++part) {
      join_base(merged, read_statistics(left.statistics[row], part * Config::kCtas + cta.rank));
    }
    const uint32_t address = smem_address(&left.output[row][column]);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
    for (uint32_t part = 0; part < cta.parts; ++part) {
      const uint32_t rank = part * Config::kCtas + cta.rank;
      const RowStatistics one = read_statistics(left.statistics[row], rank);
      const float4 values = cluster_load_float4(cluster_address(address, rank));
      const float weight = base_factor(one.base, merged.base);
      merged.sum = fmaf(weight, one.sum, merged.sum);
      sum.x = fmaf(weight, values.x, sum.x);
      sum.y = fmaf(weight, values.y, sum.y);
      sum.z = fmaf(weight, values.z, sum.z);
      sum.w = fmaf(weight, values.w, sum.w);
    }

    const float factor = output_factor(params, head, merged, -1.f);
    if (column == 0) store_statistics(params, work, head, merged);
    uint8_t* line = params.out + work.batch * params.out_batch_bytes + work.query * params.out_query_bytes +
                    head * params.out_head_bytes + column * sizeof(Element);
    const bool empty = factor < 0.f;
    *reinterpret_cast<uint2*>(line) = make_uint2(empty ? 0u : pack_pair<Element>(sum.x * factor, sum.y * factor),
                                                 empty ? 0u : pack_pair<Element>(sum.z * factor, sum.w * factor));
  }
}

}  // namespace cupymla::sparse_mla_fwd
