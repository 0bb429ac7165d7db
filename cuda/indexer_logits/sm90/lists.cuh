// Entries that reach their query's threshold: in shared memory while a run goes on, then behind those of other runs in
// global memory. In which order they come there is left open.
#pragma once

#include "../../common/ring.cuh"
#include "work.cuh"

namespace cupymla::indexer_logits {

#if CUPYMLA_FILTER == 1

// In a count in shared memory: the row's list in global memory is full, so that entries need not be counted any more.
constexpr uint32_t kFull = 0x80000000u;

// Adds an entry of a query, which is the `query`-th of the query tile and the `row`-th of all. Where its list is full,
// the entry goes to global memory by itself, until there is no room there either.
__device__ __forceinline__ void list_entry(Storage& storage, const KernelParameters& params, uint32_t buffer, int query,
                                           int64_t row, float score, int32_t key) {
  const Entry found{score, key};
  const uint32_t number = atomicAdd(&storage.counts[buffer][query], 1u);
  if (__builtin_expect(number < static_cast<uint32_t>(ThisConfig::kListed), 1)) {
    storage.entries[buffer][query][number] = found;
    return;
  }
  if (number >= kFull) return;
  const uint32_t place = atomicAdd(&params.counts[row], 1u);
  if (place < params.capacity) {
    params.entries[row * params.capacity + place] = found;
  } else {
    atomicOr(&storage.counts[buffer][query], kFull);
  }
}

// The list warp: takes each run's lists away.
__device__ __forceinline__ void move_lists(Storage& storage, const KernelParameters& params) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ring<ThisConfig::kQueryBuffers> buffers;
  RunIterator iterator(params);
  for (Run run; iterator.next(run); buffers.advance()) {
    const uint32_t buffer = buffers.stage;
    const int64_t first = static_cast<int64_t>(run.batch) * params.queries + run.first_query();
    storage.listed[buffer].wait(buffers.full);
    uint32_t own = 0, begin = 0;
    if (lane < ThisConfig::kQueries) {
      own = min(storage.counts[buffer][lane], static_cast<uint32_t>(ThisConfig::kListed));
      storage.counts[buffer][lane] = 0;
      if (own != 0) begin = atomicAdd(&params.counts[first + lane], own);
    }
#pragma unroll 1
    for (int query = 0; query < ThisConfig::kQueries; ++query) {
      const uint32_t entries = __shfl_sync(0xffffffffu, own, query);
      const uint32_t to = __shfl_sync(0xffffffffu, begin, query);
      Entry* list = params.entries + (first + query) * params.capacity;
      for (uint32_t entry = lane; entry < entries; entry += 32) {
        if (to + entry < params.capacity) list[to + entry] = storage.entries[buffer][query][entry];
      }
    }
    storage.q_free[buffer].arrive();
  }
}

#endif

}  // namespace cupymla::indexer_logits
