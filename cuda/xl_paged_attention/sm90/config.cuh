// Numbers and shared memory of the cluster split-KV variant, and what orders the accesses to it.
//
// what         | written by                  | read by             | ordered by
// -------------+-----------------------------+---------------------+------------------------------------------------
// ring[warp]   | copies of that warp; zeros  | that warp           | as in ../sm80/storage.cuh
//              | past the head, once         |                     |
//              | then that warp's sums       | all warps           | stream_copy_wait<0> and __syncwarp before they
//              |                             |                     | are written, __syncthreads after
// query        | all warps                   | all warps           | __syncthreads behind `stage_query`
// query_scale  | one lane of the row's warp  | all warps           | the one in `scale_query`
// statistics   | each warp its own           | all warps           | the __syncthreads of ring
// received     | CTAs of the cluster, by     | all warps           | `delivered`, which gets each byte; senders wait
//              | st.async                    |                     | for the cluster's barrier first
// delivered    | thread 0, once              | st.async, all warps | fence_mbarrier_init, then the cluster's barrier:
//              |                             |                     | all arrive at the start, and wait before they send
//
// A CTA waits until all that is sent to it is there, so nothing is stored in the shared memory of one that has ended,
// and nobody reads another CTA's.
//
//   warp w | length, table entry, tiles w, w + 4 .. of the CTA's part, as in the kernel for any work
//          | sums -> ring -> barrier -> row w, w + 4 .. of the four warps -> a slice of the channels to each CTA
//          | `delivered` -> row w .. of the eight CTAs -> out, or this CTA's buffer in global memory
//          | (several clusters: counter -> warp w of the last CTA of each rank: row w .. of the clusters -> out)
#pragma once

#include "../../common/barrier.cuh"
#include "../sm80/config.cuh"
#include "../sm80/schedule.cuh"
#include "../sm80/storage.cuh"

namespace cupymla::xl_paged_attention {

constexpr int kCluster = 8;  // CTAs, the most that every GPU takes

// The tensor-core engine's numbers, with room for what is sent. A cluster's CTAs are of one GPC, whose SMs are no
// multiple of eight: only where two CTAs fit on an SM is there room for as many clusters at once as SMs would have it.
template <int kHeadSizeArg, typename QueryArg, typename CacheArg, bool kPagesArg>
struct ClusterConfig : TensorConfig<kHeadSizeArg, QueryArg, CacheArg, kPagesArg> {
  using Base = TensorConfig<kHeadSizeArg, QueryArg, CacheArg, kPagesArg>;
  static constexpr int kVectors = kHeadSizeArg / 4;          // of a row's sums, of four channels each
  static constexpr int kColumns = round_up(kHeadSizeArg, 16);  // of a row of a warp's sums in its ring
  static constexpr int slice() {
    int lanes = 1;
    while (lanes * kCluster < kVectors) lanes *= 2;
    return lanes;
  }
  static constexpr int kSlice = slice();  // vectors of a row that a CTA puts together: lanes of a warp

  // What is left of a part for whoever puts a slice together.
  struct Part {
    float4 sums[Base::kRows][kSlice];
    float4 statistics[Base::kRows];  // maximum and sum of each row
  };

  static constexpr int kReceivedBytes = kCluster * sizeof(Part);
  static constexpr int kFixedBytes = kReceivedBytes + Base::kRows * Base::kQueryPitch + 1024;
  static constexpr int kCtasPerSm = ring_stages(2, kFixedBytes, Base::kStageBytes) >= 2 ? 2 : 1;
  static constexpr int kStages = ring_stages(kCtasPerSm, kFixedBytes, Base::kStageBytes);
  static_assert(kStages >= 2, "a tile must be on its way while another is worked on");
  static_assert(Base::kRows * kColumns * 4 <= kStages * Base::kStageBytes, "a warp's sums in its ring");
};

template <int kHeadSize, typename Query, typename Cache, bool kPages>
struct Line<ClusterConfig<kHeadSize, Query, Cache, kPages>> {};

template <int kHeadSize, typename Query, typename Cache, bool kPages>
struct SegmentIterator<ClusterConfig<kHeadSize, Query, Cache, kPages>> {
  Segment segment;
};

template <int kHeadSize, typename Query, typename Cache, bool kPages>
struct alignas(128) Storage<ClusterConfig<kHeadSize, Query, Cache, kPages>> {
  using Config = ClusterConfig<kHeadSize, Query, Cache, kPages>;
  uint8_t ring[kWarps][Config::kStages][Config::kStageBytes];
  alignas(16) uint8_t query[Config::kRows * Config::kQueryPitch];
  typename Config::Part received[kCluster];  // from each CTA, of this CTA's slice
  float query_scale[Config::kRows];
  float row_max[kWarps][Config::kRows];  // of scores in units of log2
  float row_sum[kWarps][Config::kRows];
  Mbarrier delivered;
};

}  // namespace cupymla::xl_paged_attention
