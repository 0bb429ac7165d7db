// The same selection for rows that are kept: by one CTA, up to 8192 columns in registers and up to 49152 in shared
// memory, or in the shared memory of a cluster. So scores are read once. Histograms of the candidates narrow down the
// score of the wanted rank; equals are taken in the order of columns. README.md has the steps. Code is kept short: a
// launch of a few us fetches each instruction for one use.
//
// All threads call every function of this file together. short_exchange.cuh says how warps meet; by then
//
// meeting       | behind it
// --------------+---------------------------------------------------------------------------------------------------
// tell          | the extrema of all warps are known
// __syncthreads | bins are counted
// tell          | how many each warp's bins hold is known
// __syncthreads | `found` is there, and bins are zero again. If `few` cannot hold what it has, on with its extrema
// gather_few    | `few` is there
// tell          | it is known what each warp has selected
//
// A search may end behind any `tell`, or there is none. Where all threads have the same largest score, one CTA meets
// once more, behind the first.
//
// CUPYMLA_SHORT: columns of a thread at most: 8, in registers; 48, in shared memory, in rolled loops.
#pragma once

#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "row.cuh"
#include "short_exchange.cuh"

namespace cupymla::topk {

constexpr int kOwn = CUPYMLA_SHORT;
constexpr int kSide = 8;  // columns of a thread that lie side by side: those of all lanes, then the next chunk's
constexpr int kChunks = kOwn / kSide;
constexpr int kOwnBins = 4;  // bins of a histogram for each thread
constexpr uint32_t kChunkBits = (1u << kSide) - 1;

constexpr bool kInRegisters = kOwn == kSide;

// A bit for each column of a thread.
using OwnBits = conditional_t<(kOwn > 32), uint64_t, uint32_t>;

static_assert(kOwn % kSide == 0 && kOwn <= 48, "the bins of a cluster's CTA are counted in 16 bits");
static_assert(kSide * 32 == 256, "a byte names a column of a warp's chunk, whose bins have room for as many");
static_assert(!kInRegisters || !kClustered);

// Bins lie behind the storage: four for each thread of the CTA. Behind them, where they are not in registers, scores.
__device__ __forceinline__ uint32_t* short_bins(uint8_t* memory) {
  return reinterpret_cast<uint32_t*>(memory + sizeof(ShortStorage));
}

// Those that this thread adds up: thread 0 has the highest ones.
__device__ __forceinline__ uint4* own_bins(const Thread& thread, uint32_t* bins) {
  return reinterpret_cast<uint4*>(bins) + (thread.threads - 1 - thread.index);
}

// To be called before the first selection.
__device__ __forceinline__ void clear_own_bins(const Thread& thread, uint32_t* bins) {
  reinterpret_cast<uint4*>(bins)[thread.index] = make_uint4(0u, 0u, 0u, 0u);
}

// Which columns a thread keeps. A warp's lie side by side, and so do a CTA's. Those in shared memory begin with the
// first one that is visible, and are as few chunks as will do.
struct Columns {
  int32_t first;   // of chunk 0
  int32_t chunks;  // that are used

  __device__ __forceinline__ Columns(const Thread& thread, const Row& row, uint32_t rank, uint32_t parts) {
    const int32_t in_warp = thread.lane * kSide;
    if constexpr (kInRegisters) {
      chunks = 1;
      first = static_cast<int32_t>(thread.warp) * (32 * kSide) + in_warp;
    } else {
      const int32_t begin = row.begin / kSide * kSide;
      const int32_t together = static_cast<int32_t>(parts * thread.threads) * kSide;
      chunks = max(1, (row.end - begin + together - 1) / together);
      first = begin + static_cast<int32_t>(rank * thread.warps + thread.warp) * (chunks * 32 * kSide) + in_warp;
    }
  }

  __device__ __forceinline__ int32_t of(int chunk) const { return first + chunk * (32 * kSide); }
};

// Calls `visit(chunk)` for each chunk that is used.
template <typename Visit>
__device__ __forceinline__ void visit_chunks(const Columns& columns, const Visit& visit) {
  if constexpr (kInRegisters) {
    visit(0);
  } else {
#pragma unroll 1
    for (int chunk = 0; chunk < columns.chunks; ++chunk) visit(chunk);
  }
}

// This thread's scores.
struct OwnScores {
  float own[kInRegisters ? kSide : 1];
  float4* const shared;
  float least = positive_infinity(), most = negative_infinity();  // of those that can be selected

  __device__ __forceinline__ OwnScores(const Thread& thread, uint32_t* bins)
      : shared(reinterpret_cast<float4*>(bins + thread.threads * kOwnBins) + thread.index) {}

  __device__ __forceinline__ void get(int chunk, float (&scores)[kSide]) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) scores[i] = own[i];
    } else {
      const float4 low = shared[chunk * 2 * blockDim.x], high = shared[(chunk * 2 + 1) * blockDim.x];
      scores[0] = low.x, scores[1] = low.y, scores[2] = low.z, scores[3] = low.w;
      scores[4] = high.x, scores[5] = high.y, scores[6] = high.z, scores[7] = high.w;
    }
  }
  __device__ __forceinline__ float one(int chunk, int i) const {
    if constexpr (kInRegisters) {
      float score = own[0];
#pragma unroll
      for (int other = 1; other < kSide; ++other) score = other == i ? own[other] : score;
      return score;
    } else {
      return reinterpret_cast<const float*>(shared + (chunk * 2 + i / 4) * blockDim.x)[i % 4];
    }
  }
  __device__ __forceinline__ void set(int chunk, const float (&scores)[kSide]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) own[i] = scores[i];
    } else {
      shared[chunk * 2 * blockDim.x] = make_float4(scores[0], scores[1], scores[2], scores[3]);
      shared[(chunk * 2 + 1) * blockDim.x] = make_float4(scores[4], scores[5], scores[6], scores[7]);
    }
  }
};

// Calls `visit(score)` for those of a chunk whose bits are set, in the order of columns. Few are.
template <typename Visit>
__device__ __forceinline__ void visit_marked(const OwnScores& scores, int chunk, uint32_t bits, const Visit& visit) {
#pragma unroll 1
  for (; bits != 0; bits &= bits - 1) visit(scores.one(chunk, __ffs(static_cast<int>(bits)) - 1));
}

// What stands for a score that is never selected: it is neither above nor equal to anything, nor an extremum.
__device__ __forceinline__ float never() { return __uint_as_float(0x7fffffffu); }

// A thread's scores on their way: its chunks that lie in the row and can be loaded in pieces of 16 bytes. All of them
// have no room in registers: those behind the first four follow.
struct LoadedScores {
  static constexpr int kAhead = kChunks < 4 ? kChunks : 4;
  static constexpr int kPieces = kSide * static_cast<int>(sizeof(Bits)) / 16;

  const Row& row;
  const Columns& columns;
  const Bits* own;
  bool aligned;
  uint4 pieces[kAhead][kPieces];

  // Loads several before any is looked at.
  __device__ __forceinline__ LoadedScores(const Row& row, const Columns& columns) : row(row), columns(columns) {
    // Computed once: else the compiler does it again for each load.
    const uint8_t* address = reinterpret_cast<const uint8_t*>(row.scores + columns.first);
    make_opaque(address);
    own = reinterpret_cast<const Bits*>(address);
    aligned = reinterpret_cast<uint64_t>(own) % 16 == 0;
    load<0, kAhead>();
  }

  // Keeps them, and loads what is left.
  __device__ __forceinline__ void keep(OwnScores& scores) {
    keep_loaded<0, kAhead>(scores);
    if (kAhead < kChunks && columns.chunks > kAhead) {
      load<kAhead, kChunks>();
      keep_loaded<kAhead, kChunks>(scores);
    }
    visit_chunks(columns, [&](int chunk) {
      if (is_whole(chunk)) return;
      const int32_t first = columns.of(chunk);
      float here[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        here[i] = never();
        if (first + i >= row.begin && first + i < row.end) here[i] = to_float(own[chunk * 32 * kSide + i]);
      }
      set(scores, chunk, here);
    });
  }

 private:
  __device__ __forceinline__ bool is_whole(int chunk) const {
    const int32_t first = columns.of(chunk);
    return aligned && chunk < columns.chunks && first >= row.begin && first + kSide <= row.end;
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void load() {
    static_assert(kEnd - kFirst <= kAhead);
#pragma unroll
    for (int chunk = kFirst; chunk < kEnd; ++chunk) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint4* source = reinterpret_cast<const uint4*>(own + chunk * 32 * kSide) + piece;
        pieces[chunk - kFirst][piece] = is_whole(chunk) ? __ldcs(source) : make_uint4(0u, 0u, 0u, 0u);
      }
    }
  }
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void keep_loaded(OwnScores& scores) const {
#pragma unroll
    for (int chunk = kFirst; chunk < kEnd; ++chunk) {
      if (!is_whole(chunk)) continue;
      float here[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const uint4& loaded = pieces[chunk - kFirst][i * kPieces / kSide];
        const int word = i * static_cast<int>(sizeof(Bits)) / 4 % 4;
        const uint32_t bits = word == 0 ? loaded.x : word == 1 ? loaded.y : word == 2 ? loaded.z : loaded.w;
        here[i] = to_float(sizeof(Bits) == 4 ? bits : i % 2 ? bits >> 16 : bits & 0xffffu);
      }
      set(scores, chunk, here);
    }
  }
  static __device__ __forceinline__ void set(OwnScores& scores, int chunk, float (&here)[kSide]) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      here[i] = here[i] > negative_infinity() ? here[i] : never();
      scores.least = fminf(scores.least, here[i]);
      scores.most = fmaxf(scores.most, here[i]);
    }
    scores.set(chunk, here);
  }
};

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

// Bins of scores from the least of an interval on. Bin 0 is of those below it, and of what is never selected. A larger
// score never has a lower bin. Bins of equal width in value fill evenly.
struct ValueBins {
  float least, scale;
  uint32_t last_bin;

  __device__ __forceinline__ uint32_t operator()(float score) const {
    return min(__float2uint_rz(fmaf(score - least, scale, 1.0f)), last_bin);
  }
  __device__ __forceinline__ void forget() { make_opaque(scale); }
};

// Bins of keys narrow any interval by their number.
struct KeyBins {
  uint32_t least, shift;

  __device__ __forceinline__ uint32_t operator()(float score) const {
    const uint32_t key = key_of(score);
    return key < least ? 0u : ((key - least) >> shift) + 1u;
  }
  __device__ __forceinline__ void forget() { make_opaque(shift); }
};

// Columns of a thread, a bit each.
struct Marks {
  OwnBits candidates;  // whose scores lie in the interval that is searched
  OwnBits above;       // and above it
};

__device__ __forceinline__ uint32_t bits_of_chunk(OwnBits bits, int chunk) {
  return static_cast<uint32_t>(bits >> chunk * kSide) & kChunkBits;
}

__device__ __forceinline__ OwnBits own_bits(uint32_t bits, int chunk) { return OwnBits{bits} << chunk * kSide; }

__device__ __forceinline__ uint32_t count_of(OwnBits bits) {
  if constexpr (kOwn > 32) return __popcll(bits);
  return __popc(static_cast<uint32_t>(bits));
}

// All others are counted in bin 0, which spares a branch for each.
template <typename Bins>
__device__ __forceinline__ void count_candidates(uint32_t* bins, const Columns& columns, const OwnScores& scores,
                                                 const Marks& marks, const Bins& bin_of) {
  visit_chunks(columns, [&](int chunk) {
    const uint32_t bits = bits_of_chunk(marks.candidates, chunk);
    if (bits == 0) return;
    float here[kSide];
    scores.get(chunk, here);
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const uint32_t bin = (bits >> i & 1u) != 0 ? bin_of(here[i]) : 0u;
      atomicAdd(&bins[bin], 1u);
    }
  });
}

// Lets candidates be those in that bin.
template <typename Bins>
__device__ __forceinline__ void keep_candidates(const Columns& columns, const OwnScores& scores, Marks& marks,
                                                uint32_t found, Bins bin_of) {
  // Bins are computed again: there are no registers to keep them.
  bin_of.forget();
  OwnBits kept = 0;
  visit_chunks(columns, [&](int chunk) {
    const uint32_t bits = bits_of_chunk(marks.candidates, chunk);
    if (bits == 0) return;
    float here[kSide];
    scores.get(chunk, here);
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      const uint32_t bin = bin_of(here[i]);
      above |= bin > found ? 1u << i : 0u;
      equal |= bin == found ? 1u << i : 0u;
    }
    marks.above |= own_bits(above & bits, chunk);
    kept |= own_bits(equal & bits, chunk);
  });
  marks.candidates = kept;
}

// Finds the bin that has the rank, in `found`; false where all bins hold fewer entries. To be called behind
// __syncthreads; bins are zero again, and where one is found synchronised.
__device__ __forceinline__ bool find_bin(Exchange& exchange, uint32_t* bins, uint32_t rank) {
  const Thread& thread = exchange.thread;
  const uint32_t number = thread.threads - 1 - thread.index;
  uint4 counts = *own_bins(thread, bins);
  *own_bins(thread, bins) = make_uint4(0u, 0u, 0u, 0u);
  if (number == 0) counts.x = 0;
  uint32_t own = counts.x + counts.y + counts.z + counts.w;
  uint32_t inclusive = warp_scan(own, thread.lane);
  const uint2* words = exchange.tell(kBinSums, make_uint2(__shfl_sync(kAllLanes, inclusive, 31), 0u));
  uint32_t warp_sum = 0;
  exchange.visit_words(words, [&](bool there, uint32_t, const uint2& word) { warp_sum += there ? word.x : 0u; });
  const uint32_t warps = warp_scan(warp_sum, thread.lane);
  if (__shfl_sync(kAllLanes, warps, 31) < rank) return false;
  const uint32_t here = __shfl_sync(kAllLanes, warps, static_cast<int>(thread.warp));
  const uint32_t before_warp = here - __shfl_sync(kAllLanes, warp_sum, static_cast<int>(thread.warp));
  if (before_warp < rank && rank <= here) {
#if CUPYMLA_CLUSTER
    counts = exchange.add_counts(counts);
    own = counts.x + counts.y + counts.z + counts.w;
    inclusive = warp_scan(own, thread.lane);
#endif
    const uint32_t before = before_warp + inclusive - own;
    if (before < rank && rank <= before + own) {
      uint32_t bin = 3, left = rank - before, count = counts.w;
      if (left > count) --bin, left -= count, count = counts.z;
      if (left > count) --bin, left -= count, count = counts.y;
      if (left > count) --bin, left -= count, count = counts.x;
      uint32_t in_parts_before = 0;
#if CUPYMLA_CLUSTER
      in_parts_before = exchange.before_in_bin(bin);
#endif
      exchange.storage.found = make_uint4(number * kOwnBins + bin, left, count, in_parts_before);
      exchange.storage.gathered = 0;
    }
  }
  exchange.count_search();
  __syncthreads();
  return true;
}

// The least and the largest key of the candidates; `first`: of all columns. `of_threads`: not the least of all, but of
// each thread's largest: as many candidates reach it as there are threads that have one.
__device__ __forceinline__ Extrema extrema_of(Exchange& exchange, const Columns& columns, const OwnScores& scores,
                                              const Marks& marks, bool first, bool of_threads) {
  float least = scores.least, most = scores.most;
  if (!first) {
    least = positive_infinity(), most = negative_infinity();
    visit_chunks(columns, [&](int chunk) {
      const uint32_t bits = bits_of_chunk(marks.candidates, chunk);
      if (bits == 0) return;
      float here[kSide];
      scores.get(chunk, here);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const float score = (bits >> i & 1u) != 0 ? here[i] : never();
        least = fminf(least, score);
        most = fmaxf(most, score);
      }
    });
  }
  if (of_threads) least = fmaxf(least, most);
  const uint2* words = exchange.tell(
      kExtrema, make_uint2(__reduce_min_sync(kAllLanes, key_of(least)), __reduce_max_sync(kAllLanes, key_of(most))));
  Extrema all{~0u, 0u};
  exchange.visit_words(words, [&](bool there, uint32_t, const uint2& word) {
    if (there) all = {min(all.least, word.x), max(all.most, word.y)};
  });
  return {__reduce_min_sync(kAllLanes, all.least), __reduce_max_sync(kAllLanes, all.most)};
}

// The key of the wanted rank among the few, which are as many.
__device__ __forceinline__ uint32_t key_of_rank(const Exchange& exchange, uint32_t entries, uint32_t rank) {
  // Every warp does the same, in whatever order they are.
  const uint32_t* few = exchange.storage.few;
  const bool there = static_cast<uint32_t>(exchange.thread.lane) < entries;
  const uint32_t mine = there ? few[exchange.thread.lane] : 0u;
  uint32_t larger = 0, as_large = 0;
#pragma unroll 2
  for (uint32_t i = 0; i < entries; ++i) {
    larger += few[i] > mine ? 1 : 0;
    as_large += few[i] >= mine ? 1 : 0;
  }
  const uint32_t lanes = __ballot_sync(kAllLanes, there && larger < rank && rank <= as_large);
  return __shfl_sync(kAllLanes, mine, __ffs(static_cast<int>(lanes)) - 1);
}

// The score of the entry of that rank; -inf where all entries that can be selected are wanted. `marks` are of all
// columns, and then of those that are above that score or may be. Bins have been set to zero by the threads that have
// them, and are zero again then.
__device__ __forceinline__ float score_of_rank(Exchange& exchange, uint32_t* bins, const Columns& columns,
                                               const OwnScores& scores, Marks& marks, uint32_t visible,
                                               uint32_t rank) {
  const Thread& thread = exchange.thread;
  const uint32_t last_bin = thread.threads * kOwnBins - 1;
  bool first = true;
  // Most scores are far below the wanted one: a bound spares counting them, and makes bins narrower.
  const uint64_t wanted_columns = static_cast<uint64_t>(rank) * static_cast<uint32_t>(columns.chunks * kSide);
  bool bounded = !kInRegisters && visible >= wanted_columns;
#pragma unroll 1
  for (bool again = false;; again = true) {
    if (again) exchange.renew();
    const Extrema all = extrema_of(exchange, columns, scores, marks, first, bounded);
    if (all.most == 0) return negative_infinity();  // no candidate
    if (all.least == all.most) {
      if (!bounded) return score_of(all.most);  // equals alone
      bounded = false;
      // Of a cluster `renew` does it: the same is told again when all have read it. Everywhere else bins come between.
      if constexpr (!kClustered) __syncthreads();
      continue;
    }
    const float least = score_of(all.least);
    const float range = score_of(all.most) - least;
    const bool by_value = first && range > 1e-30f && range < 1e30f;
    ValueBins of_values{least, __fdividef(static_cast<float>(last_bin - 1), range), last_bin};
    // A power of two of bins is enough for all keys.
    const int bits = __clz(static_cast<int>(last_bin)) - __clz(static_cast<int>(all.most - all.least));
    KeyBins of_keys{all.least, static_cast<uint32_t>(max(bits + 1, 0))};
    if (by_value) {
      count_candidates(bins, columns, scores, marks, of_values);
    } else {
      count_candidates(bins, columns, scores, marks, of_keys);
    }
    __syncthreads();
    if (!find_bin(exchange, bins, rank)) {
      if (!bounded) return negative_infinity();
      bounded = false;
      continue;
    }
    const uint4 found = exchange.storage.found;
    if (by_value) {
      keep_candidates(columns, scores, marks, found.x, of_values);
    } else {
      keep_candidates(columns, scores, marks, found.x, of_keys);
    }
    rank = found.y;
    first = bounded = false;
    if (found.z > static_cast<uint32_t>(kFew)) continue;

    visit_chunks(columns, [&](int chunk) {
      const uint32_t bits = bits_of_chunk(marks.candidates, chunk);
      visit_marked(scores, chunk, bits, [&](float score) { exchange.add_to_few(found.w, key_of(score)); });
    });
    exchange.gather_few(found.z);
    return score_of(key_of_rank(exchange, found.z, rank));
  }
}

struct ShortSelection {
  OwnBits own;     // a bit for each of this thread's columns that is selected
  uint32_t count;  // how many are selected in the row
};

// Selects the row's largest scores and writes all its results. `ids.first(chunk)` is asked for the first column of a
// thread's chunk, and `ids` with what it said for the id of the i-th one there.
template <typename Ids>
__device__ __forceinline__ ShortSelection write_short(Exchange& exchange, uint32_t* bins, const Parameters& params,
                                                      const Row& row, const Columns& columns, const OwnScores& scores,
                                                      uint32_t batch, uint32_t number, const Ids& ids) {
  const Thread& thread = exchange.thread;
  const uint32_t topk = static_cast<uint32_t>(params.topk);
  Marks marks{~OwnBits{0}, 0};
  float threshold = negative_infinity();
  const uint32_t visible = static_cast<uint32_t>(row.visible());
  if (visible > topk) threshold = score_of_rank(exchange, bins, columns, scores, marks, visible, topk);
  OwnBits equal = 0;
  visit_chunks(columns, [&](int chunk) {
    const uint32_t bits = bits_of_chunk(marks.candidates, chunk);
    if (bits == 0) return;
    float here[kSide];
    scores.get(chunk, here);
    uint32_t larger = 0, as_large = 0;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      larger |= here[i] > threshold ? 1u << i : 0u;
      as_large |= here[i] == threshold ? 1u << i : 0u;
    }
    marks.above |= own_bits(larger & bits, chunk);
    equal |= own_bits(as_large & bits, chunk);
  });

  // Entries above the threshold, and its equals: of warps before this one, and of all.
  const uint32_t warp_sum = __reduce_add_sync(kAllLanes, count_of(marks.above) | count_of(equal) << 16);
  const uint2* words = exchange.tell(kSelected, make_uint2(warp_sum & 0xffffu, warp_sum >> 16));
  uint2 before = make_uint2(0u, 0u), all = before;
  exchange.visit_words(words, [&](bool there, uint32_t part, const uint2& word) {
    const bool lower = exchange.is_before(part) ||
                       (part == exchange.rank && static_cast<uint32_t>(thread.lane) < thread.warp);
    if (there) all = make_uint2(all.x + word.x, all.y + word.y);
    if (there && lower) before = make_uint2(before.x + word.x, before.y + word.y);
  });
  before = make_uint2(__reduce_add_sync(kAllLanes, before.x), __reduce_add_sync(kAllLanes, before.y));
  all = make_uint2(__reduce_add_sync(kAllLanes, all.x), __reduce_add_sync(kAllLanes, all.y));
  const uint32_t kept = min(all.y, topk - all.x);  // of the equals, the first ones
  const uint32_t count = all.x + kept;

  // The warp's bins have room for a byte of each column in a chunk. Nobody counts any more.
  uint8_t* staged = reinterpret_cast<uint8_t*>(own_bins(thread, bins) + thread.lane - 31);
  __syncwarp();
  const Target target(params, batch, number);
  visit_chunks(columns, [&](int chunk) {
    uint32_t selected = bits_of_chunk(marks.above, chunk), equals = bits_of_chunk(equal, chunk);
    const uint32_t own = __popc(selected) | __popc(equals) << 16;
    const uint32_t inclusive = warp_scan(own, thread.lane);
    const uint32_t lower = inclusive - own;
    const uint32_t equals_before = before.y + (lower >> 16);
    const uint32_t room = kept > equals_before ? kept - equals_before : 0u;
    if (room == 0) equals = 0;
    while (__popc(equals) > room) equals ^= 0x80000000u >> __clz(static_cast<int>(equals));
    selected |= equals;
    marks.above |= own_bits(equals, chunk);
    const uint32_t place = before.x + (lower & 0xffffu) + min(equals_before, kept);
    // Ids that lie side by side in memory are stored together: lanes hand their columns to those that store them.
    const uint32_t warp_place = __shfl_sync(kAllLanes, place, 0);
    uint32_t entries = place - warp_place;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      if ((selected >> i & 1u) != 0) staged[entries++] = static_cast<uint8_t>(thread.lane * kSide + i);
    }
    entries = __shfl_sync(kAllLanes, entries, 31);
    __syncwarp();
    const int32_t first = ids.first(chunk);
#pragma unroll 1
    for (uint32_t base = 0; base < entries; base += 32) {
      const uint32_t entry = base + thread.lane;
      const uint32_t column = staged[min(entry, entries - 1)];
      const int32_t chunk_first = __shfl_sync(kAllLanes, first, static_cast<int>(column / kSide));
      if (entry < entries) target.indices[warp_place + entry] = ids(chunk_first, column % kSide);
    }
    __syncwarp();
    if (target.values != nullptr) {
      Bits* values = target.values + place;
      visit_marked(scores, chunk, selected, [&](float score) { *values++ = to_bits(score); });
    }
    if constexpr (!kInRegisters) {
      const uint32_t chunk_sum = __shfl_sync(kAllLanes, inclusive, 31);
      before = make_uint2(before.x + (chunk_sum & 0xffffu), before.y + (chunk_sum >> 16));
    }
  });
  for (uint32_t i = count + exchange.rank * thread.threads + thread.index; i < topk;
       i += exchange.parts * thread.threads) {
    target.indices[i] = -1;
    if (target.values != nullptr) target.values[i] = static_cast<Bits>(lowest_bits());
  }
  if (exchange.rank == 0 && thread.index == 0) {
    params.count[batch * params.count_batch + number * params.count_row] = static_cast<int32_t>(count);
  }
  return {marks.above, count};
}

// Ids that are columns.
struct ColumnIds {
  const Columns& columns;

  __device__ __forceinline__ int32_t first(int chunk) const { return columns.of(chunk); }
  __device__ __forceinline__ int32_t operator()(int32_t first, uint32_t i) const {
    return first + static_cast<int32_t>(i);
  }
};

}  // namespace cupymla::topk
