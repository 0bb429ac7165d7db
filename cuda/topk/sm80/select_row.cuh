// The kernel's work for one row: the largest scores, exact and in a total order. README.md says how.
#pragma once

#include "emit.cuh"
#include "sort.cuh"
#include "stream.cuh"
#include "whole_row.cuh"

namespace cupymla::topk {

// Makes the bitmap that of the selected columns, by reading the row once; a second or third time where the threshold
// let too few or too many entries through. Returns how many are selected; `kFailed`, and nothing is, where it never let
// the right number through. A cluster's other CTAs read with the first one, once, and have no result. Synchronised
// before and after.
constexpr uint32_t kFailed = 0xffffffffu;
constexpr int kAttempts = 3;

__device__ __forceinline__ uint32_t select_streamed(Storage& storage, const Thread& thread, const Parameters& params,
                                                    const Arrays& arrays, const Row& row) {
  const uint32_t topk = static_cast<uint32_t>(params.topk);
  const uint32_t capacity = static_cast<uint32_t>(params.capacity);
  const Gather gather(arrays, params);
  uint32_t parts = parts_of_row();
  uint32_t rank = first_rank(thread, params, row);
  uint32_t above, equals;
  for (int attempt = 0;; ++attempt) {
    float threshold = negative_infinity();
    clear_bitmap(thread, arrays, row);
    if (thread.index == 0) storage.candidates = storage.equals = 0;
    if (row.visible() > params.capacity) threshold = sampled_threshold(storage, row, rank);
    meet(parts);
    stream(storage, thread, gather, row, threshold, attempt == 0 ? part_of_row() : 0, parts);
    meet(parts);
    if (part_of_row() != 0) return kFailed;
    parts = 1;
    above = storage.candidates;
    equals = storage.equals;
    const bool few = above + equals < topk && threshold > negative_infinity();
    if (above <= capacity && !few) break;
    if (attempt + 1 == kAttempts) return kFailed;
    // Now it is known how many entries such a rank stands for.
    const float passed = static_cast<float>(few ? above + equals : above) + 1.0f;
    const float wanted = 1.5f * static_cast<float>(topk) / passed;
    rank = static_cast<uint32_t>(static_cast<float>(rank) * wanted) + (few ? 4u : 1u);
    __syncthreads();
  }

  uint64_t least = kLeastPlace;
  uint32_t kept_equals = 0;
  if (above >= topk) {
    least = select(storage, arrays.places, above, topk);
    if (equals != 0) clear_bitmap(thread, arrays, row);
  } else {
    kept_equals = min(equals, topk - above);
    if (equals > kept_equals) keep_first(storage, thread, arrays.bitmap, bitmap_words(row), kept_equals);
  }
  __syncthreads();
  const int32_t first = row.column(0);
  for (uint32_t i = thread.index; i < above; i += thread.threads) {
    const uint64_t place = arrays.places[i];
    const uint32_t bit = static_cast<uint32_t>(column_of(place) - first);
    if (place >= least) atomicOr(&arrays.bitmap[bit / 32], 1u << bit % 32);
  }
  __syncthreads();
  return min(topk, above) + kept_equals;
}

// Sorts the first `count` entries of `arrays.sorted` and writes them from `entry` on. Synchronised before and after.
__device__ __forceinline__ void write_sorted(const Thread& thread, const Parameters& params, const Arrays& arrays,
                                             const Row& row, const Target& target, uint32_t entry, uint32_t count) {
  const uint32_t size = static_cast<uint32_t>(params.sorted);
  for (uint32_t i = count + thread.index; i < size; i += thread.threads) arrays.sorted[i] = 0;
  __syncthreads();
  sort(thread, arrays.sorted, size);
  for (uint32_t i = thread.index; i < count; i += thread.threads) {
    target.write(row, entry + i, column_of(arrays.sorted[i]));
  }
  __syncthreads();
}

// Returns how many entries the row has.
__device__ __forceinline__ uint32_t run(Storage& storage, const Thread& thread, const Parameters& params,
                                        const Arrays& arrays, const Row& row, const Target& target) {
  const uint32_t topk = static_cast<uint32_t>(params.topk);
  const bool by_score = params.by_score != 0;
  if (row.groups == 0) return 0;
  const Sink sink{row, target, by_score ? arrays.sorted : nullptr};
  const bool all = static_cast<uint32_t>(row.visible()) <= topk;

  if (!all && params.streamed != 0 && bitmap_words(row) <= static_cast<uint32_t>(params.bitmap_words)) {
    const uint32_t selected = select_streamed(storage, thread, params, arrays, row);
    if (part_of_row() != 0) return 0;
    if (selected != kFailed) {
      emit_bitmap(storage, thread, arrays.bitmap, row, sink);
      if (by_score) write_sorted(thread, params, arrays, row, target, 0, selected);
      return selected;
    }
  }

  if (part_of_row() != 0) return 0;
  // In pieces that can be sorted; in one where nothing is.
  uint32_t written = 0;
  uint64_t limit = ~0ull;
  while (written < topk && limit > kLeastPlace) {
    const uint32_t wanted = by_score ? min(topk, written + static_cast<uint32_t>(params.sorted)) : topk;
    const bool rest = static_cast<uint32_t>(row.visible()) <= wanted;
    const uint64_t least = rest ? kLeastPlace : find_in_row(storage, params, arrays, row, wanted);
    const uint32_t count = emit_row(storage, row, least, limit, sink);
    if (by_score) write_sorted(thread, params, arrays, row, target, written, count);
    written += count;
    limit = least;
  }
  return written;
}

// The batch entry and the row of a CTA, or of its cluster.
struct Place {
  int64_t batch, row;

  __device__ __forceinline__ explicit Place(const Parameters& params) {
    const uint32_t place = blockIdx.x / parts_of_row();
    batch = place / static_cast<uint32_t>(params.rows);
    row = place % static_cast<uint32_t>(params.rows);
  }
};

// Selects a row's largest scores and writes all its results. Returns how many they are; synchronised, then, for what
// the caller reads of them. A cluster's other CTAs have none.
__device__ __forceinline__ uint32_t write_row(Storage& storage, const Thread& thread, const Parameters& params,
                                              const Arrays& arrays, const Row& row, const Place& place) {
  for (uint32_t i = thread.index; i < kBins; i += thread.threads) storage.bins[i] = 0;
  if (thread.index == 0) storage.equals = 0;
  __syncthreads();
  const Target target(params, place.batch, place.row);
  const uint32_t count = run(storage, thread, params, arrays, row, target);
  if (part_of_row() != 0) return 0;
  for (uint32_t i = count + thread.index; i < static_cast<uint32_t>(params.topk); i += thread.threads) {
    target.indices[i] = -1;
    if (target.values != nullptr) target.values[i] = static_cast<Bits>(lowest_bits());
  }
  if (thread.index == 0) {
    params.count[place.batch * params.count_batch + place.row * params.count_row] = static_cast<int32_t>(count);
  }
  __syncthreads();
  return count;
}

}  // namespace cupymla::topk
