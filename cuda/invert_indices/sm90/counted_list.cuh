// A token's list in a chunk of few queries put in order by a warp, where no query names the token twice: an entry's
// rank is the number of smaller queries that do, which have a bit each.
#pragma once

#include "../../common/page_place.cuh"
#include "../../common/warp.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::invert_indices {

constexpr uint32_t kCountedQueries = 32 * 32;  // a lane adds up 32 of them
constexpr int kLeastCounted = 24;              // entries of a list for which this takes less than to compare them

struct CountedList {
  WarpRoom& room;
  const Parameters& params;
  const int32_t* list;  // the chunk's entries, of this token
  const int32_t count;
  const uint32_t chunk_entries;  // all of the chunk
  const int lane;

  // Writes to `ordered` the list in ascending order, with `first_entry` added; or returns false, where a query names
  // the token twice. All lanes take part.
  __device__ __forceinline__ bool order(int32_t* ordered, int32_t first_entry) const {
    room.query_bits[lane] = 0;
    __syncwarp();  // zeros are there
    for_each_entry([&](int32_t, uint32_t query) { atomicOr(room.query_bits + query / 32, 1u << query % 32); });
    __syncwarp();  // bits are there
    const uint32_t own = __popc(room.query_bits[lane]), until = warp_scan(own, lane);
    room.before[lane] = until - own;
    const bool is_each_once = __shfl_sync(0xffffffffu, until, 31) == static_cast<uint32_t>(count);
    __syncwarp();  // sums are there
    if (is_each_once) {
      for_each_entry([&](int32_t entry, uint32_t query) {
        const uint32_t smaller = room.query_bits[query / 32] & ((1u << query % 32) - 1);
        const uint32_t place = room.before[query / 32] + __popc(smaller);
        if (place < static_cast<uint32_t>(count)) ordered[place] = first_entry + entry;
      });
    }
    __syncwarp();  // the room may be written again
    return is_each_once;
  }

 private:
  // Calls `take` with each entry and its query. The second time entries come from the nearest cache.
  template <typename Take>
  __device__ __forceinline__ void for_each_entry(Take take) const {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int32_t base = lane; base < count; base += 32 * kAtOnce) {
      uint32_t own[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        own[i] = base + i * 32 < count ? static_cast<uint32_t>(list[base + i * 32]) : UINT32_MAX;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // Another kernel may have changed the indices meanwhile: then lists are wrong, but nothing else.
        if (own[i] >= chunk_entries) continue;
        take(static_cast<int32_t>(own[i]),
             PagePlace(own[i], static_cast<uint32_t>(params.topk), params.topk_reciprocal).block);
      }
    }
  }
};

}  // namespace cupymla::invert_indices
