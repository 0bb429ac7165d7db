// A row read once: a threshold from a sample lets somewhat more entries through than are wanted, those above it are
// kept in shared memory, those that equal it as bits of a bitmap, and the exact selection is made among them. Nothing
// is ever lost: where a sample misleads, too few entries or more than there is room for, the caller is told.
//
// The CTAs of a cluster read a row together; the first one keeps what they find. A CTA alone is a cluster of one.
#pragma once

#include "gather.cuh"
#include "row.cuh"
#include "select.cuh"

namespace cupymla::topk {

// Standard deviations of the sample's count by which the threshold is lower than the wanted rank says: at 6, one row in
// millions of independent scores has fewer entries above it than wanted.
constexpr float kDeviations = 6.0f;

// The rank in the sample of a score that more than `topk` of the visible ones are likely to reach, and few more.
__device__ __forceinline__ uint32_t first_rank(const Thread& thread, const Parameters& params, const Row& row) {
  const float share = static_cast<float>(params.topk) / static_cast<float>(row.visible());
  const float mean = share * static_cast<float>(thread.threads * kGroup);
  return static_cast<uint32_t>(mean + kDeviations * sqrtf(mean * (1.0f - share))) + 2u;
}

// About the score of that rank in a sample of one group for each thread, at most one eighth of the rank more of them
// above it. Synchronised after.
__device__ __forceinline__ float sampled_threshold(Storage& storage, const Row& row, uint32_t rank) {
  const Thread thread;
  Group scores;
  scores.load(row, static_cast<int32_t>(static_cast<uint64_t>(thread.index) * static_cast<uint32_t>(row.groups) /
                                        thread.threads));
  uint32_t keys[kGroup];
  Extrema extrema{~0u, 0u};
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    keys[i] = key_of(scores.score(i));
    if (keys[i] != 0) extrema = {min(extrema.least, keys[i]), max(extrema.most, keys[i])};
  }
  extrema = block_extrema(storage, thread, extrema);
  if (extrema.most == 0) return negative_infinity();
  Interval<uint32_t> interval{extrema.least, extrema.most, rank};

  // First bins of equal width in value: those of keys are narrow around zero alone. Numbers far out spoil them, and
  // then bins of keys do it.
  const float least = score_of(extrema.least);
  const float width = (score_of(extrema.most) - least) * (1.0f / (kBins - 1));
  bool by_value = width > 0.0f && width < 1e30f;
  for (;;) {
    const int shift = interval.shift();
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (keys[i] == 0 || !interval.holds(keys[i])) continue;
      const uint32_t bin = by_value ? min(static_cast<uint32_t>(__fdividef(scores.score(i) - least, width)), kBins - 1u)
                                    : (keys[i] - interval.first) >> shift;
      atomicAdd(&storage.bins[bin], 1u);
    }
    __syncthreads();
    Interval<uint32_t> narrower = interval;
    const uint32_t inside = narrow(storage, thread, narrower);
    if (inside == 0) return negative_infinity();
    // Of a bin that holds much the exact score counts: where many are equal, it is theirs.
    if (by_value) {
      if (inside <= rank / 8) return least + static_cast<float>(storage.bin) * width;
      by_value = false;
    } else {
      if (shift == 0 || inside <= rank / 8) return score_of(narrower.first);
      interval = narrower;
    }
  }
}

// Entries of a group go to the candidates, or into the bitmap. All lanes of the warp come here.
__device__ __forceinline__ void sort_out(Storage& storage, const Thread& thread, const Gather& gather, const Row& row,
                                         const Group& scores, int32_t group, float threshold, uint32_t& equals) {
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    above |= scores.score(i) > threshold ? 1u << i : 0u;
    equal |= scores.score(i) == threshold ? 1u << i : 0u;
  }
  // -inf equals the threshold where that lets every number through.
  if (equal != 0 && threshold > negative_infinity()) {
    gather.mark(static_cast<uint32_t>(group), equal);
    equals += __popc(equal);
  }
  if (!__any_sync(kAllLanes, above != 0)) return;
  const uint32_t own = __popc(above);
  const uint32_t inclusive = warp_scan(own, thread.lane);
  uint32_t base = 0;
  if (thread.lane == 31) base = gather.take(storage.candidates, inclusive);
  uint32_t to = __shfl_sync(kAllLanes, base, 31) + inclusive - own;
  if (own == 0 || to + own > gather.capacity) return;
  const int32_t column = row.column(group);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (above & 1u << i) gather.put(to++, place_of(scores.score(i), column + i));
  }
}

// Reads this CTA's part of the row: rank `part` of `parts`. Candidates, as many as `storage.candidates` says or the
// capacity, are above the threshold; bits of the bitmap, `storage.equals` of them, equal it. To be called with a
// cleared bitmap and counts, behind a barrier; synchronised by the caller.
__device__ __forceinline__ void stream(Storage& storage, const Thread& thread, const Gather& gather, const Row& row,
                                       float threshold, uint32_t part, uint32_t parts) {
  uint32_t equals = 0;
  const int32_t step = static_cast<int32_t>(thread.threads * parts);
  const int32_t end = row.groups - 1;  // of the groups that are sure to be whole, from 1 on
  // First the two that may not be, by two lanes; then two groups ahead of the one that is looked at.
  int32_t group = row.groups;
  if (part == 0 && thread.index < 2) group = static_cast<int32_t>(thread.index) * end;
  if (group == 0 && thread.index == 1) group = row.groups;
  Group current, next, after;
  current.load(row, group);
  int32_t ahead = 1 + static_cast<int32_t>(part * thread.threads + thread.index);
  next.clear();
  if (ahead < end) next.load_whole(row, ahead);
  after.clear();
  if (ahead + step < end) after.load_whole(row, ahead + step);
  for (;;) {
    sort_out(storage, thread, gather, row, current, group, threshold, equals);
    if (ahead - thread.lane >= end) break;
    group = ahead;
    current = next;
    next = after;
    ahead += step;
    after.clear();
    if (ahead + step < end) after.load_whole(row, ahead + step);
  }
  equals = __reduce_add_sync(kAllLanes, equals);
  if (thread.lane == 0 && equals != 0) gather.take(storage.equals, equals);
}

}  // namespace cupymla::topk
