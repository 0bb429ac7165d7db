// The entry of a wanted rank. Histograms over an interval of places: the bin that holds the rank is the next interval,
// 2048 times narrower, until a warp can put what is left in order by itself. Entries are distinct, so that ends.
#pragma once

#include "block.cuh"
#include "order.cuh"

namespace cupymla::topk {

// An interval of places, or of keys, and what is wanted in it.
template <typename Place>
struct Interval {
  Place first, last;  // both inside
  uint32_t rank;         // of the wanted entry among those inside, the largest has rank 1

  __device__ __forceinline__ bool holds(Place place) const { return place - first <= last - first; }

  // Places of a bin, as a power of two.
  __device__ __forceinline__ int shift() const {
    const int bits = 64 - __clzll(static_cast<long long>(last - first));  // of keys, too
    return bits > kBinBits ? bits - kBinBits : 0;
  }
};

// Narrows the interval to the bin that holds the rank, of counts in `storage.bins`, which are all zero again then.
// Returns how many entries the bin has; 0 where the interval has fewer entries than the rank, and stays as it was.
// To be called behind a barrier; synchronised after.
template <typename Place>
__device__ __forceinline__ uint32_t narrow(Storage& storage, const Thread& thread, Interval<Place>& interval) {
  // Thread t has the t-th highest bins.
  const int per_thread = kBins / static_cast<int>(thread.threads);
  const int end = kBins - static_cast<int>(thread.index) * per_thread;
  uint32_t own = 0;
  for (int i = 1; i <= per_thread; ++i) own += storage.bins[end - i];
  const Sum above = block_scan(storage, thread, own);
  if (above.total < interval.rank) {
    for (int i = 1; i <= per_thread; ++i) storage.bins[end - i] = 0;
    __syncthreads();
    return 0;
  }
  uint32_t seen = above.before;
  for (int i = 1; i <= per_thread; ++i) {
    const uint32_t inside = storage.bins[end - i];
    storage.bins[end - i] = 0;
    if (seen < interval.rank && interval.rank <= seen + inside) {
      storage.bin = end - i;
      storage.above = seen;
      storage.inside = inside;
      storage.gathered = 0;
    }
    seen += inside;
  }
  __syncthreads();
  const int shift = interval.shift();
  interval.first += static_cast<Place>(storage.bin) << shift;
  const Place bin_last = interval.first + ((Place{1} << shift) - 1);
  if (bin_last < interval.last) interval.last = bin_last;
  interval.rank -= storage.above;
  return storage.inside;
}

// The entry of rank `rank`, 1 to count, among `count` distinct places in shared memory. To be called behind a barrier;
// synchronised after.
__device__ __forceinline__ uint64_t select(Storage& storage, const uint64_t* places, uint32_t count, uint32_t rank) {
  const Thread thread;
  Extrema keys{~0u, 0u};
#pragma unroll 4
  for (uint32_t i = thread.index; i < count; i += thread.threads) {
    const uint32_t key = static_cast<uint32_t>(places[i] >> 32);
    keys = {min(keys.least, key), max(keys.most, key)};
  }
  keys = block_extrema(storage, thread, keys);
  Interval<uint64_t> interval{static_cast<uint64_t>(keys.least) << 32,
                              static_cast<uint64_t>(keys.most) << 32 | 0xffffffffu, rank};
  uint32_t inside;
  do {
    const int shift = interval.shift();
#pragma unroll 4
    for (uint32_t i = thread.index; i < count; i += thread.threads) {
      const uint64_t place = places[i];
      if (interval.holds(place)) atomicAdd(&storage.bins[(place - interval.first) >> shift], 1u);
    }
    __syncthreads();
    inside = narrow(storage, thread, interval);
  } while (inside > kFew);
#pragma unroll 4
  for (uint32_t i = thread.index; i < count; i += thread.threads) {
    const uint64_t place = places[i];
    if (interval.holds(place)) storage.few[atomicAdd(&storage.gathered, 1u)] = place;
  }
  __syncthreads();
  // Every warp does the same.
  const uint64_t mine = static_cast<uint32_t>(thread.lane) < inside ? storage.few[thread.lane] : 0ull;
  uint32_t larger_ones = 0;
  for (uint32_t i = 0; i < inside; ++i) larger_ones += storage.few[i] > mine ? 1 : 0;
  const bool wanted = static_cast<uint32_t>(thread.lane) < inside && larger_ones + 1 == interval.rank;
  const uint32_t lane = __ffs(static_cast<int>(__ballot_sync(kAllLanes, wanted))) - 1;
  const uint64_t found = storage.few[lane];
  __syncthreads();
  return found;
}

}  // namespace cupymla::topk
