// Selected columns in ascending order, of a bitmap or of the row itself.
#pragma once

#include "row.cuh"
#include "block.cuh"

namespace cupymla::topk {

// What becomes of a selected column, of which `rank` have come before it.
struct Sink {
  const Row& row;
  const Target& target;
  uint64_t* sorted;  // where it is sorted first; null: it is written at once

  __device__ __forceinline__ void operator()(uint32_t rank, int32_t column) const {
    if (sorted != nullptr) {
      sorted[rank] = place_of(row.score(column), column);
    } else {
      target.write(row, rank, column);
    }
  }
};

// Words of the bitmap that a warp has: a multiple of 32, so that lanes meet words side by side.
__device__ __forceinline__ uint32_t words_per_warp(const Thread& thread, uint32_t words) {
  return (words + thread.warps * 32 - 1) / (thread.warps * 32) * 32;
}

__device__ __forceinline__ uint32_t bitmap_words(const Row& row) { return (static_cast<uint32_t>(row.groups) + 3) / 4; }

__device__ __forceinline__ void clear_bitmap(const Thread& thread, const Arrays& arrays, const Row& row) {
  for (uint32_t i = thread.index; i < bitmap_words(row); i += thread.threads) arrays.bitmap[i] = 0;
}

// Calls `visit(word, number, rank of its first bit)` for all words, lanes side by side. To be called behind a barrier.
template <typename Visit>
__device__ __forceinline__ void visit_bitmap(Storage& storage, const Thread& thread, const uint32_t* bitmap,
                                             uint32_t words, const Visit& visit) {
  const uint32_t per_warp = words_per_warp(thread, words);
  const uint32_t first = thread.warp * per_warp;
  const uint32_t end = min(words, first + per_warp);
  uint32_t own = 0;
  for (uint32_t i = first + thread.lane; i < end; i += 32) own += __popc(bitmap[i]);
  const Sum sum = block_scan(storage, thread, own);
  uint32_t rank = __shfl_sync(kAllLanes, sum.before, 0);
  for (uint32_t base = first; base < end; base += 32) {
    const uint32_t number = base + thread.lane;
    const uint32_t word = number < end ? bitmap[number] : 0u;
    const uint32_t bits = __popc(word);
    const uint32_t inclusive = warp_scan(bits, thread.lane);
    if (word != 0) visit(word, number, rank + inclusive - bits);
    rank += __shfl_sync(kAllLanes, inclusive, 31);
  }
}

// Lets only the first `count` bits stand. Synchronised after.
__device__ __forceinline__ void keep_first(Storage& storage, const Thread& thread, uint32_t* bitmap, uint32_t words,
                                           uint32_t count) {
  visit_bitmap(storage, thread, bitmap, words, [&](uint32_t word, uint32_t number, uint32_t rank) {
    uint32_t kept = 0;
    for (; word != 0 && rank < count; ++rank) {
      kept |= word & (0u - word);
      word &= word - 1;
    }
    bitmap[number] = kept;
  });
  __syncthreads();
}

// Columns of the bitmap. To be called behind a barrier.
__device__ __forceinline__ void emit_bitmap(Storage& storage, const Thread& thread, const uint32_t* bitmap,
                                            const Row& row, const Sink& sink) {
  const int32_t first = row.column(0);
  visit_bitmap(storage, thread, bitmap, bitmap_words(row), [&](uint32_t word, uint32_t number, uint32_t rank) {
    const int32_t column = first + static_cast<int32_t>(number * 32);
    for (; word != 0; word &= word - 1) sink(rank++, column + __ffs(static_cast<int>(word)) - 1);
  });
}

// Columns of the row whose places are at least `least` and below `limit`; returns how many.
__device__ __forceinline__ uint32_t emit_row(Storage& storage, const Row& row, uint64_t least, uint64_t limit,
                                          const Sink& sink) {
  const Thread thread;
  uint32_t emitted = 0;
  for (int32_t first = 0; first < row.groups; first += static_cast<int32_t>(thread.threads)) {
    const int32_t group = first + static_cast<int32_t>(thread.index);
    Group scores;
    scores.load(row, group);
    const int32_t column = row.column(group);
    uint32_t selected = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const uint64_t place = place_of(scores.score(i), column + i);
      selected |= place >= least && place < limit ? 1u << i : 0u;
    }
    const Sum sum = block_scan(storage, thread, __popc(selected));
    uint32_t rank = emitted + sum.before;
    for (; selected != 0; selected &= selected - 1) sink(rank++, column + __ffs(static_cast<int>(selected)) - 1);
    emitted += sum.total;
  }
  return emitted;
}

}  // namespace cupymla::topk
