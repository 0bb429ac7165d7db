// The entry of a wanted rank in a row of any length, without a sample: the row is read once for each histogram.
#pragma once

#include "row.cuh"
#include "select.cuh"

namespace cupymla::topk {

// Calls `visit(place)` for every column of the row, and for columns that are none with place below `kLeastPlace`; all
// lanes of a warp together.
template <typename Visit>
__device__ __forceinline__ void visit_row(const Thread& thread, const Row& row, const Visit& visit) {
  for (int32_t first = static_cast<int32_t>(thread.warp) * 32; first < row.groups;
       first += static_cast<int32_t>(thread.threads)) {
    const int32_t group = first + thread.lane;
    Group scores;
    scores.load(row, group);
    const int32_t column = row.column(group);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) visit(place_of(scores.score(i), column + i));
  }
}

// The place of the entry of that rank; `kLeastPlace` where fewer entries can be selected. Synchronised before and
// after.
__device__ __forceinline__ uint64_t find_in_row(Storage& storage, const Parameters& params, const Arrays& arrays,
                                             const Row& row, uint32_t rank) {
  const Thread thread;
  Interval<uint64_t> interval{kLeastPlace, static_cast<uint64_t>(kLargestKey) << 32 | 0xffffffffu, rank};
  uint32_t inside;
  do {
    const int shift = interval.shift();
    visit_row(thread, row, [&](uint64_t place) {
      const bool holds = interval.holds(place);
      const uint32_t bin = static_cast<uint32_t>((place - interval.first) >> shift);
      // Lanes with the same bin add once: in rows of equals all have the same.
      const uint32_t peers = __match_any_sync(kAllLanes, holds ? bin : ~0u);
      if (holds && __ffs(static_cast<int>(peers)) - 1 == thread.lane) atomicAdd(&storage.bins[bin], __popc(peers));
    });
    __syncthreads();
    inside = narrow(storage, thread, interval);
    if (inside == 0) return kLeastPlace;
  } while (inside > static_cast<uint32_t>(params.capacity));
  if (thread.index == 0) storage.candidates = 0;
  __syncthreads();
  visit_row(thread, row, [&](uint64_t place) {
    if (interval.holds(place)) arrays.places[atomicAdd(&storage.candidates, 1u)] = place;
  });
  __syncthreads();
  return select(storage, arrays.places, inside, interval.rank);
}

}  // namespace cupymla::topk
