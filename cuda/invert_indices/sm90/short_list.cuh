// Short lists put in order by a warp, as many at a time as fit it: every entry's rank is the number of smaller ones in
// its list.
#pragma once

#include "../../common/warp.cuh"
#include "storage.cuh"

namespace cupymla::invert_indices {

// 1 where a is below b, neither of which is negative, else 0: two instructions, where a comparison takes three.
__device__ __forceinline__ uint32_t below(int32_t a, int32_t b) {
  return (static_cast<uint32_t>(a) - static_cast<uint32_t>(b)) >> 31;
}

// Each lane has a list of up to kShortList of the chunk's entries, no two equal, or an empty one. Writes them to
// `ordered`, each list in ascending order, with `first_entry`, the chunk's first one, added. All lanes take part.
__device__ __forceinline__ void order_short_lists(WarpRoom& room, const int32_t* scattered, int32_t* ordered,
                                                  int32_t first_entry, const ChunkList& own_list, int lane) {
  const int32_t groups = (own_list.count + 3) / 4;
  const int32_t end = static_cast<int32_t>(warp_scan(static_cast<uint32_t>(groups), lane)), begin = end - groups;
  const int32_t all = __shfl_sync(0xffffffffu, end, 31);
  int32_t* const places = reinterpret_cast<int32_t*>(room.entries);
#pragma unroll 1
  for (int32_t first = 0; first < all;) {
    // Whole lists, as long as they end within 32 groups.
    const bool taken = groups != 0 && begin >= first && end <= first + 32;
    const uint32_t takers = __ballot_sync(0xffffffffu, taken);
    const uint32_t starts = __reduce_or_sync(0xffffffffu, taken ? 1u << (begin - first) : 0u);
    if (taken) room.lists[begin - first] = own_list;
    __syncwarp();  // lists are there
    // This lane's group is one of the list that starts there; behind the last list it has none of its entries.
    const int start = 31 - __clz(static_cast<int>(starts & (0xffffffffu >> (31 - lane))));
    const ChunkList list = room.lists[start];
    const int32_t place = (lane - start) * 4;
    int32_t own[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Behind a list is what is below nothing. Another kernel may have changed the indices meanwhile, so that entries
      // are anything, but none is negative: then lists are wrong, but nothing else.
      own[i] = place + i < list.count ? scattered[list.begin + place + i] & INT32_MAX : INT32_MAX;
    }
    room.entries[lane] = make_int4(own[0], own[1], own[2], own[3]);
    room.shifts[lane] = list.to - start * 4;
    __syncwarp();  // entries are there
    const uint32_t from = static_cast<uint32_t>(start) * 4;
    uint32_t to[4] = {from, from, from, from};
    const int others_end = place < list.count ? start + (list.count + 3) / 4 : start;
#pragma unroll 1
    for (int group = start; group < others_end; ++group) {
      const int4 others = room.entries[group];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] += below(others.x, own[i]) + below(others.y, own[i]) + below(others.z, own[i]) + below(others.w, own[i]);
      }
    }
    __syncwarp();  // entries are read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (own[i] == INT32_MAX) to[i] = lane * 4 + i, own[i] = -1;
      places[to[i]] = own[i];
    }
    __syncwarp();  // entries are in order
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = i * 32 + lane, entry = places[slot];
      if (entry >= 0) ordered[room.shifts[static_cast<uint32_t>(slot) / 4] + slot] = first_entry + entry;
    }
    __syncwarp();  // the room may be written again
    first = __shfl_sync(0xffffffffu, end, 31 - __clz(static_cast<int>(takers)));
  }
}

}  // namespace cupymla::invert_indices
