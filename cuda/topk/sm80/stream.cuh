// A row read once: a threshold from a sample lets about as many entries through as are wanted, those above it are kept
// in shared memory, those that equal it as bits of a bitmap, and the exact selection is made among them. Nothing is
// ever lost: where a sample misleads, too few entries or more than there is room for, the caller is told.
#pragma once

#include "row.cuh"
#include "select.cuh"

namespace cupymla::topk {

// Standard deviations of the sample's count by which the threshold is lower than the wanted rank says: at 6, one row in
// millions of independent scores has fewer entries above it than wanted.
constexpr float kDeviations = 6.0f;

// A score that more than `topk` of the visible ones are likely to reach, and few more. Synchronised after.
__device__ __forceinline__ float sampled_threshold(Storage& storage, const Thread& thread, const Parameters& params,
                                                   const Arrays& arrays, const Row& row) {
  const uint32_t sample = static_cast<uint32_t>(params.sample);
  const uint64_t visible = static_cast<uint32_t>(row.visible());
  for (uint32_t i = thread.index; i < sample; i += thread.threads) {
    const int32_t column = row.begin + static_cast<int32_t>(i * visible / sample);
    // Distinct: the sample's own numbers tell equals apart.
    arrays.places[i] = place_of(row.score(column), static_cast<int32_t>(i));
  }
  __syncthreads();
  const float share = static_cast<float>(params.topk) / static_cast<float>(row.visible());
  const float mean = share * static_cast<float>(sample);
  const float wanted = mean + kDeviations * sqrtf(mean * (1.0f - share)) + 1.0f;
  const uint32_t rank = min(sample, static_cast<uint32_t>(wanted) + 1u);
  const uint64_t place = select(storage, arrays.places, sample, rank);
  const uint32_t key = static_cast<uint32_t>(place >> 32);
  return key == 0 ? negative_infinity() : score_of(key);
}

// Entries of a group go to the candidates, or into the bitmap. All lanes of the warp come here.
__device__ __forceinline__ void sort_out(Storage& storage, const Thread& thread, const Parameters& params,
                                         const Arrays& arrays, const Row& row, const Group& scores, int32_t group,
                                         float threshold, uint32_t& equals) {
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    above |= scores.score(i) > threshold ? 1u << i : 0u;
    equal |= scores.score(i) == threshold ? 1u << i : 0u;
  }
  // -inf equals the threshold where that lets every number through.
  if (equal != 0 && threshold > negative_infinity()) {
    reinterpret_cast<uint8_t*>(arrays.bitmap)[group] = static_cast<uint8_t>(equal);
    equals += __popc(equal);
  }
  if (!__any_sync(kAllLanes, above != 0)) return;
  const uint32_t own = __popc(above);
  const uint32_t inclusive = warp_scan(own, thread.lane);
  uint32_t base = 0;
  if (thread.lane == 31) base = atomicAdd(&storage.candidates, inclusive);
  uint32_t to = __shfl_sync(kAllLanes, base, 31) + inclusive - own;
  if (own == 0 || to + own > static_cast<uint32_t>(params.capacity)) return;
  const int32_t column = row.column(group);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (above & 1u << i) {
      // As it is: the order is made later, of few.
      arrays.places[to++] = static_cast<uint64_t>(__float_as_uint(scores.score(i))) << 32 |
                            static_cast<uint32_t>(column + i);
    }
  }
}

// Reads the row. Candidates, as many as `storage.candidates` says or the capacity, are above the threshold; bits of the
// bitmap, `storage.equals` of them, equal it. To be called with a cleared bitmap and counts, behind a barrier;
// synchronised after.
__device__ __forceinline__ void stream(Storage& storage, const Thread& thread, const Parameters& params,
                                       const Arrays& arrays, const Row& row, float threshold) {
  constexpr int kAhead = sizeof(Bits) == 4 ? 2 : 4;  // groups whose loads are under way
  uint32_t equals = 0;
  Group next[kAhead];
  const int32_t step = static_cast<int32_t>(thread.threads);
  const int32_t warp_first = static_cast<int32_t>(thread.warp) * 32;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) next[i].load(row, warp_first + thread.lane + i * step);
  for (int32_t first = warp_first; first < row.groups; first += kAhead * step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t group = first + thread.lane + i * step;
      const Group scores = next[i];
      next[i].load(row, group + kAhead * step);
      sort_out(storage, thread, params, arrays, row, scores, group, threshold, equals);
    }
  }
  equals = __reduce_add_sync(kAllLanes, equals);
  if (thread.lane == 0 && equals != 0) atomicAdd(&storage.equals, equals);
  __syncthreads();
  const uint32_t kept = min(storage.candidates, static_cast<uint32_t>(params.capacity));
  for (uint32_t i = thread.index; i < kept; i += thread.threads) {
    const uint64_t entry = arrays.places[i];
    arrays.places[i] = place_of(__uint_as_float(static_cast<uint32_t>(entry >> 32)), static_cast<int32_t>(entry));
  }
  __syncthreads();
}

}  // namespace cupymla::topk
