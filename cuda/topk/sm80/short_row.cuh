// The same selection for rows of at most 8192 columns, in one CTA: each thread keeps eight columns side by side in
// registers, so that scores are read once. Histograms of the candidates narrow down the score of the wanted rank;
// equals are taken in the order of columns, which is that of threads. README.md has the steps. Code is kept short: a
// launch of a few us fetches each instruction for one use.
//
// The only barrier is __syncthreads; all threads call every function of this file together.
//
// barrier | behind it
// 1       | `extrema` of all warps; bins are zero
// 2       | bins are counted
// 3       | `warp_sums` are there; bins have been read, and are zero again
// 4       | `found` is there. If it is more than `few` can hold, on with 1, of what is left
// 5       | `few` is there
// 6       | `last_sums`, of what each warp has selected
//
// `extrema` is written again behind 4, `warp_sums` behind 2: all have read them by then. A search may end behind 1 and
// 3, or there is none: so what is written for 6 has memory of its own.
#pragma once

#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "block.cuh"
#include "row.cuh"

namespace cupymla::topk {

constexpr int kOwn = 8;      // columns of a thread
constexpr int kOwnBins = 4;  // bins of a histogram for each thread

struct alignas(16) ShortStorage {
  uint2 extrema[kMaxWarps];  // the least key less 1, and the largest
  uint32_t warp_sums[kMaxWarps], last_sums[kMaxWarps];
  uint32_t few[kFew];  // keys
  // These are read together: no other word that changes may be among them.
  alignas(16) uint4 found;  // the bin of the wanted rank, the rank in it, how many entries it has; nothing
  uint32_t gathered;        // entries in `few`
};

// Bins lie behind the storage: four for each thread of the CTA.
__device__ __forceinline__ uint32_t* short_bins(uint8_t* memory) {
  return reinterpret_cast<uint32_t*>(memory + sizeof(ShortStorage));
}

// To be called before the first selection.
__device__ __forceinline__ void clear_own_bins(const Thread& thread, uint32_t* bins) {
  reinterpret_cast<uint4*>(bins)[thread.index] = make_uint4(0u, 0u, 0u, 0u);
}

// Sums over the threads before this one, and over all, of which `sums` holds one for each warp. To be called behind a
// barrier; `inclusive` is the running sum of the warp.
__device__ __forceinline__ Sum sum_of_warps(const Thread& thread, const uint32_t* sums, uint32_t inclusive,
                                            uint32_t own) {
  const uint32_t warp_sum = static_cast<uint32_t>(thread.lane) < thread.warps ? sums[thread.lane] : 0u;
  const uint32_t warps = warp_scan(warp_sum, thread.lane);
  const uint32_t before = __shfl_sync(kAllLanes, warps - warp_sum, static_cast<int>(thread.warp));
  return {before + inclusive - own, __shfl_sync(kAllLanes, warps, 31)};
}

// This thread's scores; -inf where a column is not visible.
__device__ __forceinline__ void load_own(const Thread& thread, const Row& row, float (&scores)[kOwn]) {
  const int32_t first = static_cast<int32_t>(thread.index) * kOwn;
  // Computed once: else the compiler does it again for each load.
  const uint8_t* address = reinterpret_cast<const uint8_t*>(row.scores + first);
  make_opaque(address);
  const Bits* own = reinterpret_cast<const Bits*>(address);
  const bool aligned = reinterpret_cast<uint64_t>(own) % 16 == 0;
  if (aligned && first >= row.begin && first + kOwn <= row.end) {
    const uint4* source = reinterpret_cast<const uint4*>(own);
    if constexpr (sizeof(Bits) == 4) {
      const uint4 low = __ldcs(source), high = __ldcs(source + 1);
      const uint32_t words[kOwn] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) scores[i] = to_float(words[i]);
    } else {
      const uint4 loaded = __ldcs(source);
      const uint32_t words[kOwn / 2] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) scores[i] = to_float(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    scores[i] = negative_infinity();
    if (first + i >= row.begin && first + i < row.end) scores[i] = to_float(own[i]);
  }
}

// The score's bits in the type of scores, of which none is lost as a float.
__device__ __forceinline__ Bits to_bits(float score) {
#if CUPYMLA_SCORES == 0
  return __float_as_uint(score);
#elif CUPYMLA_SCORES == 1
  return static_cast<Bits>(__float_as_uint(score) >> 16);
#else
  return static_cast<Bits>(__half_as_ushort(__float2half_rn(score)));
#endif
}

// The score of the entry of that rank; -inf where no more than `rank` entries can be selected and it makes no
// difference. Bins have been set to zero by the threads that have them, and are zero again then.
__device__ __forceinline__ float score_of_rank(ShortStorage& storage, uint32_t* bins, const Thread& thread,
                                               const float (&scores)[kOwn], uint32_t rank) {
  uint32_t keys[kOwn];  // 0: no candidate
#pragma unroll
  for (int i = 0; i < kOwn; ++i) keys[i] = key_of(scores[i]);
  const uint32_t last_bin = thread.threads * kOwnBins - 1;
  uint4* own_bins = reinterpret_cast<uint4*>(bins) + (thread.threads - 1 - thread.index);  // thread 0 has the highest

  uint32_t inside;
  // First bins of equal width in value, which fill evenly; then of keys, which narrow any interval by their number.
  bool by_value = true;
#pragma unroll 1
  do {
    Extrema all{~0u, 0u};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) all = {min(all.least, keys[i] - 1), max(all.most, keys[i])};
    all = {__reduce_min_sync(kAllLanes, all.least), __reduce_max_sync(kAllLanes, all.most)};
    if (thread.lane == 0) storage.extrema[thread.warp] = make_uint2(all.least, all.most);
    __syncthreads();  // 1
    const bool there = static_cast<uint32_t>(thread.lane) < thread.warps;
    const uint2 of_warp = there ? storage.extrema[thread.lane] : make_uint2(~0u, 0u);
    all = {__reduce_min_sync(kAllLanes, of_warp.x) + 1, __reduce_max_sync(kAllLanes, of_warp.y)};
    // No candidate, or equals alone.
    if (all.least == all.most) return all.most == 0 ? negative_infinity() : score_of(all.most);

    const float least = score_of(all.least);
    const float range = score_of(all.most) - least;
    by_value = by_value && range > 1e-30f && range < 1e30f;
    const float scale = __fdividef(static_cast<float>(last_bin), range);
    // The largest power of two of bins is enough for all keys.
    const int bits = __clz(static_cast<int>(last_bin + 1)) - __clz(static_cast<int>(all.most - all.least));
    const int shift = max(bits + 1, 0);
    uint32_t own_bin[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own_bin[i] = (keys[i] - all.least) >> shift;
      if (by_value) own_bin[i] = min(__float2uint_rz((scores[i] - least) * scale), last_bin);
      if (keys[i] != 0) atomicAdd(&bins[own_bin[i]], 1u);
    }
    __syncthreads();  // 2
    const uint4 counts = *own_bins;
    *own_bins = make_uint4(0u, 0u, 0u, 0u);
    const uint32_t own = counts.x + counts.y + counts.z + counts.w;
    const uint32_t inclusive = warp_scan(own, thread.lane);
    if (thread.lane == 31) storage.warp_sums[thread.warp] = inclusive;
    __syncthreads();  // 3
    const Sum above = sum_of_warps(thread, storage.warp_sums, inclusive, own);
    if (above.total < rank) return negative_infinity();
    if (above.before < rank && rank <= above.before + own) {
      uint32_t bin = (thread.threads - 1 - thread.index) * kOwnBins + 3, left = rank - above.before, count = counts.w;
      if (left > count) --bin, left -= count, count = counts.z;
      if (left > count) --bin, left -= count, count = counts.y;
      if (left > count) --bin, left -= count, count = counts.x;
      storage.found = make_uint4(bin, left, count, 0u);
      storage.gathered = 0;
    }
    __syncthreads();  // 4
    const uint4 found = storage.found;
    rank = found.y;
    inside = found.z;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) keys[i] = own_bin[i] == found.x ? keys[i] : 0u;
    by_value = false;
  } while (inside > kFew);

#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (keys[i] != 0) storage.few[atomicAdd(&storage.gathered, 1u)] = keys[i];
  }
  __syncthreads();  // 5
  // Every warp does the same, in whatever order they are.
  const bool there = static_cast<uint32_t>(thread.lane) < inside;
  const uint32_t mine = there ? storage.few[thread.lane] : 0u;
  uint32_t larger = 0, as_large = 0;
#pragma unroll 2
  for (uint32_t i = 0; i < inside; ++i) {
    const uint32_t other = storage.few[i];
    larger += other > mine ? 1 : 0;
    as_large += other >= mine ? 1 : 0;
  }
  const uint32_t lanes = __ballot_sync(kAllLanes, there && larger < rank && rank <= as_large);
  return score_of(__shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(lanes)) - 1));
}

struct ShortSelection {
  uint32_t own;     // a bit for each of this thread's columns that is selected
  uint32_t before;  // how many are selected of the columns before these
  uint32_t count;   // and of all
};

// `visible`: how many columns are. Synchronised as behind barrier 6.
__device__ __forceinline__ ShortSelection select_short(ShortStorage& storage, uint32_t* bins, const Thread& thread,
                                                       const float (&scores)[kOwn], uint32_t visible, uint32_t topk) {
  const bool searched = visible > topk;
  const float threshold = searched ? score_of_rank(storage, bins, thread, scores, topk) : negative_infinity();
  uint32_t above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    above |= scores[i] > threshold ? 1u << i : 0u;
    equal |= scores[i] == threshold ? 1u << i : 0u;
  }
  if (threshold == negative_infinity()) equal = 0;
  // Two sums at a time: neither passes 8192.
  const uint32_t own = __popc(above) | __popc(equal) << 16;
  const uint32_t inclusive = warp_scan(own, thread.lane);
  if (thread.lane == 31) storage.last_sums[thread.warp] = inclusive;
  __syncthreads();  // 6
  const Sum sum = sum_of_warps(thread, storage.last_sums, inclusive, own);
  const uint32_t all_above = sum.total & 0xffffu;
  const uint32_t kept = min(sum.total >> 16, topk - all_above);  // of the equals, the first ones
  const uint32_t equals_before = sum.before >> 16;
  const uint32_t room = kept > equals_before ? kept - equals_before : 0u;
  if (room == 0) equal = 0;
  while (__popc(equal) > room) equal ^= 0x80000000u >> __clz(static_cast<int>(equal));
  return {above | equal, (sum.before & 0xffffu) + min(equals_before, kept), all_above + kept};
}

// Writes what is selected: for this thread's i-th column `id(i)`.
template <typename Id>
__device__ __forceinline__ void write_short(const Thread& thread, const Parameters& params, const Target& target,
                                            const float (&scores)[kOwn], const ShortSelection& selection, const Id& id,
                                            int32_t* count) {
  int32_t* ids = target.indices + selection.before;
#pragma unroll 1
  for (uint32_t left = selection.own; left != 0; left &= left - 1) *ids++ = id(__ffs(static_cast<int>(left)) - 1);
  if (target.values != nullptr) {
    Bits* values = target.values + selection.before;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (selection.own >> i & 1u) *values++ = to_bits(scores[i]);
    }
  }
  for (uint32_t i = selection.count + thread.index; i < static_cast<uint32_t>(params.topk); i += thread.threads) {
    target.indices[i] = -1;
    if (target.values != nullptr) target.values[i] = static_cast<Bits>(lowest_bits());
  }
  if (thread.index == 0) *count = static_cast<int32_t>(selection.count);
}

}  // namespace cupymla::topk
