// Shared memory of a CTA, and what orders the accesses to it.
//
// what         | written by                  | read by             | ordered by
// -------------+-----------------------------+---------------------+------------------------------------------------
// ring[warp]   | copies of that warp; zeros  | that warp           | stream_copy_wait for its own copies, then
//              | past the head, once         |                     | __syncwarp for the other lanes'; the same one
//              |                             |                     | is behind the last read of the other stage,
//              |                             |                     | which is refilled then
// query        | all warps, a segment begins | all warps           | __syncthreads after writing; the one after
//              |                             |                     | `store_statistics` before the next segment's
// query_scale  | one lane of the row's warp  | all warps           | the same
// statistics   | each warp its own           | all warps           | __syncthreads in `finish`; the one of the next
//              |                             |                     | segment's query before it writes them
// merged_sum   | the last warp               | all warps           | __syncthreads before results are stored; as above
// exchange     | each warp its own, in       | all threads         | __syncthreads before results are stored, and
//              | rounds of columns           |                     | between rounds; as above
// tiles, even  | the first warp, once        | all threads         | __syncthreads at the start
// turn         | the last warp, once         | all threads         | __syncthreads of the first segment's query
// walk         | the first warp the first,   | all threads         | __syncthreads at the start; then those of
//              | the last warp the next one, |                     | `finish`, after which the two walks change places;
//              | not in use                  |                     | written behind the one of the query
// spread       | the last warp, with `iterator` | all threads         | __syncthreads in `finish`
// last         | thread 0                    | all threads         | __syncthreads in `arrive`
//
// Every warp runs its own ring: the warps of a CTA take every fourth tile of a segment and meet only where a segment
// begins (Q) and ends (their results are put together). Copies run ahead across segments, so the memory system has
// work while warps meet.
//
//   warp w | copy tile 0            | segment: wait tile 0, copy 1, S = Q K, softmax, O += P V; wait tile 1, copy 2 ...
//          | (before Q is there)    | end: O, maxima, sums -> exchange -> out, or partials; the next segment's tile is
//          |                        | already on its way
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"
#include "schedule.cuh"

namespace cupymla::xl_paged_attention {

template <typename Config>
struct alignas(128) Storage {
  uint8_t ring[kWarps][Config::kStages][Config::kStageBytes > 0 ? Config::kStageBytes : 16];
  alignas(16) uint8_t query[Config::kRows * Config::kQueryPitch];
  float query_scale[Config::kRows];  // what scores have to be multiplied by for the scaling of Q
  alignas(16) float exchange[kMergeFloats];
  float row_max[kWarps][Config::kRows];  // of scores in units of log2
  float row_sum[kWarps][Config::kRows];
  float merged_sum[Config::kRows];
  int64_t tiles;                // of the line
  bool even;                    // whether all sequences have as many tiles
  uint32_t launch;              // of this launch (arrivals.cuh)
  SegmentIterator<Config> iterator[2];  // the segment that is worked on, and the next one
  Spread spread;                // of the unit that is worked on
  bool last;
};

}  // namespace cupymla::xl_paged_attention
