// The same selection for rows of at most 32768 columns, in one CTA that keeps the row: up to 8192 columns in registers,
// above in shared memory. So scores are read once. Histograms of the candidates narrow down the score of the wanted
// rank; equals are taken in the order of columns. README.md has the steps. Code is kept short: a launch of a few us
// fetches each instruction for one use.
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
//
// CUPYMLA_SHORT: columns of a thread: 8, in registers; 32, in shared memory, in rolled loops.
#pragma once

#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "block.cuh"
#include "row.cuh"

namespace cupymla::topk {

constexpr int kOwn = CUPYMLA_SHORT;
constexpr int kSide = 8;  // columns of a thread that lie side by side: those of all lanes, then the next chunk's
constexpr int kChunks = kOwn / kSide;
constexpr int kOwnBins = 4;  // bins of a histogram for each thread

constexpr bool kInRegisters = kOwn == kSide;
constexpr int kUnroll = kInRegisters ? kOwn : 4;

static_assert(kOwn % kSide == 0 && kOwn <= 32, "a bit for each column");
static_assert(kOwn * kMaxThreads < 65536, "16 bits count columns");

struct alignas(16) ShortStorage {
  uint2 extrema[kMaxWarps];  // the least and the largest key
  uint32_t warp_sums[kMaxWarps], last_sums[kMaxWarps];
  uint32_t few[kFew];  // keys
  // These are read together: no other word that changes may be among them.
  alignas(16) uint4 found;  // the bin of the wanted rank, the rank in it, how many entries it has; nothing
  uint32_t gathered;        // entries in `few`
};

// Bins lie behind the storage: four for each thread of the CTA. Behind them, where they are not in registers, scores.
__device__ __forceinline__ uint32_t* short_bins(uint8_t* memory) {
  return reinterpret_cast<uint32_t*>(memory + sizeof(ShortStorage));
}

// This thread's scores.
struct OwnScores {
  float own[kInRegisters ? kOwn : 1];
  float* const shared;

  __device__ __forceinline__ OwnScores(const Thread& thread, uint32_t* bins)
      : shared(reinterpret_cast<float*>(bins + thread.threads * kOwnBins) + thread.index) {}

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kInRegisters) return own[i];
    return shared[i * blockDim.x];
  }
  __device__ __forceinline__ void set(int i, float score) {
    if constexpr (kInRegisters) {
      own[i] = score;
    } else {
      shared[i * blockDim.x] = score;
    }
  }
};

// To be called before the first selection.
__device__ __forceinline__ void clear_own_bins(const Thread& thread, uint32_t* bins) {
  reinterpret_cast<uint4*>(bins)[thread.index] = make_uint4(0u, 0u, 0u, 0u);
}

// The first of a thread's columns in a chunk.
__device__ __forceinline__ int32_t first_column(const Thread& thread, int chunk) {
  return static_cast<int32_t>(thread.warp) * (32 * kOwn) + chunk * (32 * kSide) + thread.lane * kSide;
}

// Sums over the threads before this one, and over all, of which `sums` holds one for each warp. To be called behind a
// barrier; `before` is the sum over lanes before this one.
__device__ __forceinline__ Sum sum_of_warps(const Thread& thread, const uint32_t* sums, uint32_t before) {
  const uint32_t warp_sum = static_cast<uint32_t>(thread.lane) < thread.warps ? sums[thread.lane] : 0u;
  const uint32_t warps = warp_scan(warp_sum, thread.lane);
  before += __shfl_sync(kAllLanes, warps - warp_sum, static_cast<int>(thread.warp));
  return {before, __shfl_sync(kAllLanes, warps, 31)};
}

// What stands for a score that is never selected: it is neither above nor equal to anything, nor an extremum.
__device__ __forceinline__ float never() { return __uint_as_float(0x7fffffffu); }

// This thread's scores.
__device__ __forceinline__ void load_own(const Thread& thread, const Row& row, OwnScores& scores) {
  // Computed once: else the compiler does it again for each load.
  const uint8_t* address = reinterpret_cast<const uint8_t*>(row.scores + first_column(thread, 0));
  make_opaque(address);
  const Bits* own = reinterpret_cast<const Bits*>(address);
  const bool aligned = reinterpret_cast<uint64_t>(own) % 16 == 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk, own += 32 * kSide) {
    const int32_t first = first_column(thread, chunk);
    float here[kSide];
    if (aligned && first >= row.begin && first + kSide <= row.end) {
      const uint4* source = reinterpret_cast<const uint4*>(own);
      if constexpr (sizeof(Bits) == 4) {
        const uint4 low = __ldcs(source), high = __ldcs(source + 1);
        const uint32_t words[kSide] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kSide; ++i) here[i] = to_float(words[i]);
      } else {
        const uint4 loaded = __ldcs(source);
        const uint32_t words[kSide / 2] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int i = 0; i < kSide; ++i) here[i] = to_float(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        here[i] = never();
        if (first + i >= row.begin && first + i < row.end) here[i] = to_float(own[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      scores.set(chunk * kSide + i, here[i] > negative_infinity() ? here[i] : never());
    }
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

// Bins of equal width in value, which fill evenly.
struct ValueBins {
  float least, scale;
  uint32_t last_bin;

  __device__ __forceinline__ uint32_t operator()(float score) const {
    return min(__float2uint_rz((score - least) * scale), last_bin);
  }
  __device__ __forceinline__ void forget() { make_opaque(scale); }
};

// Bins of keys, which narrow any interval by their number.
struct KeyBins {
  uint32_t least, shift;

  __device__ __forceinline__ uint32_t operator()(float score) const { return (key_of(score) - least) >> shift; }
  __device__ __forceinline__ void forget() { make_opaque(shift); }
};

// Counts the candidates in bins, finds the bin that has the rank, and lets candidates be those in it. False where there
// are fewer candidates than the rank. Barriers 2, 3 and 4.
template <typename Bins>
__device__ __forceinline__ bool narrow_short(ShortStorage& storage, uint32_t* bins, const Thread& thread,
                                             const OwnScores& scores, uint32_t& candidates, uint32_t& rank,
                                             uint32_t& inside, Bins bin_of) {
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) {
    if (candidates >> i & 1u) atomicAdd(&bins[bin_of(scores[i])], 1u);
  }
  __syncthreads();  // 2
  const uint32_t number = thread.threads - 1 - thread.index;  // thread 0 has the highest bins
  uint4* own_bins = reinterpret_cast<uint4*>(bins) + number;
  const uint4 counts = *own_bins;
  *own_bins = make_uint4(0u, 0u, 0u, 0u);
  const uint32_t own = counts.x + counts.y + counts.z + counts.w;
  const uint32_t inclusive = warp_scan(own, thread.lane);
  if (thread.lane == 31) storage.warp_sums[thread.warp] = inclusive;
  __syncthreads();  // 3
  const Sum above = sum_of_warps(thread, storage.warp_sums, inclusive - own);
  if (above.total < rank) return false;
  if (above.before < rank && rank <= above.before + own) {
    uint32_t bin = number * kOwnBins + 3, left = rank - above.before, count = counts.w;
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
  // Bins are computed again: there are no registers to keep them.
  bin_of.forget();
  uint32_t left = 0;
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) left |= bin_of(scores[i]) == found.x ? 1u << i : 0u;
  candidates &= left;
  return true;
}

// The score of the entry of that rank; -inf where all entries that can be selected are wanted. Bins have been set to
// zero by the threads that have them, and are zero again then.
__device__ __forceinline__ float score_of_rank(ShortStorage& storage, uint32_t* bins, const Thread& thread,
                                               const OwnScores& scores, uint32_t rank) {
  const uint32_t last_bin = thread.threads * kOwnBins - 1;
  uint32_t candidates = 0;
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) candidates |= scores[i] > negative_infinity() ? 1u << i : 0u;
  uint32_t inside;
  bool first = true;
#pragma unroll 1
  do {
    float least = positive_infinity(), most = negative_infinity();
#pragma unroll(kUnroll)
    for (int i = 0; i < kOwn; ++i) {
      const float score = candidates >> i & 1u ? scores[i] : never();
      least = fminf(least, score);
      most = fmaxf(most, score);
    }
    Extrema all{__reduce_min_sync(kAllLanes, key_of(least)), __reduce_max_sync(kAllLanes, key_of(most))};
    if (thread.lane == 0) storage.extrema[thread.warp] = make_uint2(all.least, all.most);
    __syncthreads();  // 1
    const bool there = static_cast<uint32_t>(thread.lane) < thread.warps;
    const uint2 of_warp = there ? storage.extrema[thread.lane] : make_uint2(~0u, 0u);
    all = {__reduce_min_sync(kAllLanes, of_warp.x), __reduce_max_sync(kAllLanes, of_warp.y)};
    if (all.most == 0) return negative_infinity();            // no candidate
    if (all.least == all.most) return score_of(all.most);  // equals alone

    least = score_of(all.least);
    const float range = score_of(all.most) - least;
    bool enough;
    if (first && range > 1e-30f && range < 1e30f) {
      const float scale = __fdividef(static_cast<float>(last_bin), range);
      enough = narrow_short(storage, bins, thread, scores, candidates, rank, inside, ValueBins{least, scale, last_bin});
    } else {
      // The largest power of two of bins is enough for all keys.
      const int bits = __clz(static_cast<int>(last_bin + 1)) - __clz(static_cast<int>(all.most - all.least));
      const KeyBins of_keys{all.least, static_cast<uint32_t>(max(bits + 1, 0))};
      enough = narrow_short(storage, bins, thread, scores, candidates, rank, inside, of_keys);
    }
    if (!enough) return negative_infinity();
    first = false;
  } while (inside > kFew);

  if (candidates != 0) {
#pragma unroll(kUnroll)
    for (int i = 0; i < kOwn; ++i) {
      if (candidates >> i & 1u) storage.few[atomicAdd(&storage.gathered, 1u)] = key_of(scores[i]);
    }
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
  uint32_t own;              // a bit for each of this thread's columns that is selected
  uint32_t before[kChunks];  // how many are selected of the columns before each chunk's
  uint32_t count;            // and of all
};

// `visible`: how many columns are. Synchronised as behind barrier 6.
__device__ __forceinline__ ShortSelection select_short(ShortStorage& storage, uint32_t* bins, const Thread& thread,
                                                       const OwnScores& scores, uint32_t visible, uint32_t topk) {
  const bool searched = visible > topk;
  const float threshold = searched ? score_of_rank(storage, bins, thread, scores, topk) : negative_infinity();
  uint32_t above = 0, equal = 0;
#pragma unroll(kUnroll)
  for (int i = 0; i < kOwn; ++i) {
    above |= scores[i] > threshold ? 1u << i : 0u;
    equal |= scores[i] == threshold ? 1u << i : 0u;
  }
  // Two sums at a time, of the warp's columns before each chunk of this lane's.
  constexpr uint32_t kChunk = (1u << kSide) - 1;
  uint32_t before[kChunks], warp_sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int shift = chunk * kSide;
    const uint32_t own = __popc(above >> shift & kChunk) | __popc(equal >> shift & kChunk) << 16;
    const uint32_t inclusive = warp_scan(own, thread.lane);
    before[chunk] = warp_sum + inclusive - own;
    warp_sum += __shfl_sync(kAllLanes, inclusive, 31);
  }
  if (thread.lane == 31) storage.last_sums[thread.warp] = warp_sum;
  __syncthreads();  // 6
  const Sum sum = sum_of_warps(thread, storage.last_sums, 0u);
  const uint32_t all_above = sum.total & 0xffffu;
  const uint32_t kept = min(sum.total >> 16, topk - all_above);  // of the equals, the first ones
  ShortSelection selection{above, {}, all_above + kept};
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const uint32_t both = sum.before + before[chunk];
    const uint32_t equals_before = both >> 16;
    const uint32_t room = kept > equals_before ? kept - equals_before : 0u;
    uint32_t equals = room == 0 ? 0u : equal >> chunk * kSide & kChunk;
    while (__popc(equals) > room) equals ^= 0x80000000u >> __clz(static_cast<int>(equals));
    selection.own |= equals << chunk * kSide;
    selection.before[chunk] = (both & 0xffffu) + min(equals_before, kept);
  }
  return selection;
}

// Writes what is selected: `id(chunk, i)` for the i-th column of this thread's in a chunk.
template <typename Id>
__device__ __forceinline__ void write_short(const Thread& thread, const Parameters& params, const Target& target,
                                            const OwnScores& scores, const ShortSelection& selection, const Id& id,
                                            int32_t* count) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const uint32_t own = selection.own >> chunk * kSide & ((1u << kSide) - 1);
    int32_t* ids = target.indices + selection.before[chunk];
#pragma unroll 1
    for (uint32_t left = own; left != 0; left &= left - 1) *ids++ = id(chunk, __ffs(static_cast<int>(left)) - 1);
    if (target.values == nullptr) continue;
    Bits* values = target.values + selection.before[chunk];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      if (own >> i & 1u) *values++ = to_bits(scores[chunk * kSide + i]);
    }
  }
  for (uint32_t i = selection.count + thread.index; i < static_cast<uint32_t>(params.topk); i += thread.threads) {
    target.indices[i] = -1;
    if (target.values != nullptr) target.values[i] = static_cast<Bits>(lowest_bits());
  }
  if (thread.index == 0) *count = static_cast<int32_t>(selection.count);
}

}  // namespace cupymla::topk
