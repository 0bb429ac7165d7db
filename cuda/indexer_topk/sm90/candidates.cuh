// The selection from a row's list of entries that reached its threshold. Where there is no telling it from that, the
// row is flagged: all of its scores are written, and selected from.
#pragma once

#include "../../topk/sm80/select_row.cuh"
#include "limit.cuh"

namespace cupymla::indexer_topk {

// Flags a row, or has later kernels leave it alone.
__device__ __forceinline__ void flag_row(const FilterParameters& params, uint32_t number, const topk::Row& row,
                                         bool flagged) {
  params.flagged_starts[number] = flagged ? row.begin : 0;
  params.flagged_ends[number] = flagged ? row.end : 0;
  if (flagged) atomicAdd(&params.flagged[number / static_cast<uint32_t>(params.chunk_rows)], 1);
}

__device__ __forceinline__ void select_listed(const FilterParameters& params, uint8_t* shared_memory) {
  using namespace cupymla::topk;
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Arrays arrays(shared_memory + sizeof(Storage), params);
  const Thread thread;
  const uint32_t number = blockIdx.x;
  const Row row(params, 0, number, limit_of(params, number));
  const uint32_t topk = static_cast<uint32_t>(params.topk);
  const uint32_t listed = params.counts[number];
  // What does not reach -inf is never selected.
  const bool few = listed < topk && params.thresholds[number] > negative_infinity();
  const bool flagged = few || listed > static_cast<uint32_t>(params.capacity);
  if (thread.index == 0) flag_row(params, number, row, flagged);
  if (flagged) return;

  for (uint32_t i = thread.index; i < kBins; i += thread.threads) storage.bins[i] = 0;
  clear_bitmap(thread, arrays, row);
  const int64_t first_entry = static_cast<int64_t>(number) * params.capacity;
  uint32_t selectable = 0;
  for (uint32_t i = thread.index; i < listed; i += thread.threads) {
    const uint2 entry = __ldcs(reinterpret_cast<const uint2*>(params.entries) + first_entry + i);
    const uint64_t place = place_of(__uint_as_float(entry.x), static_cast<int32_t>(entry.y));
    arrays.places[i] = place;
    selectable += place >= kLeastPlace ? 1 : 0;
  }
  const uint32_t count = min(topk, block_scan(storage, thread, selectable).total);
  const uint64_t least = count == topk ? select(storage, arrays.places, listed, topk) : kLeastPlace;
  const int32_t first = row.column(0);
  for (uint32_t i = thread.index; i < listed; i += thread.threads) {
    const uint64_t place = arrays.places[i];
    const uint32_t bit = static_cast<uint32_t>(column_of(place) - first);
    if (place >= least) atomicOr(&arrays.bitmap[bit / 32], 1u << bit % 32);
  }
  __syncthreads();
  const Target target(params, 0, number);
  emit_bitmap(storage, thread, arrays.bitmap, row, Sink{row, target, nullptr});
  for (uint32_t i = count + thread.index; i < topk; i += thread.threads) target.indices[i] = -1;
  if (thread.index == 0) params.count[number * params.count_row] = static_cast<int32_t>(count);
}

}  // namespace cupymla::indexer_topk
