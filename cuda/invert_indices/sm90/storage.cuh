// Shared memory of a CTA of `order`, and the sizes that it follows from.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::invert_indices {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kShortList = 128;         // entries of a list that a warp puts in order by comparisons, at most
constexpr uint32_t kWindow = 4096;      // queries whose entries in a longer list are counted at a time
constexpr uint32_t kPart = kWindow / kWarps;  // of a window, whose counts a warp adds up
static_assert(kPart % 128 == 0, "a lane has four neighbouring counts at a time");

// A token's list in a chunk.
struct alignas(16) ChunkList {
  int32_t begin, count;  // in the chunk's entries by token
  int32_t to;            // where it goes, in the batch entry's entries
  int32_t token;
};

// A warp's: lists that it puts in order together, in groups of four entries, of which a lane has one.
struct WarpRoom {
  ChunkList lists[32];       // by their first group; then long ones, by lane
  int4 entries[32];          // by group
  int32_t shifts[32];        // by group: what makes a place in `entries` one in the batch entry's entries
  uint32_t query_bits[32];   // of one list: which queries have an entry
  uint32_t before[32];       // queries of the words before that have one
  uint32_t long_lists;       // a bit for each lane whose list is long
};
static_assert(sizeof(int4) * 32 == sizeof(int32_t) * kShortList, "the longest short list fits");

struct OrderStorage {
  WarpRoom rooms[kWarps];
  // By query of the window: how many entries it has in the list; then where its next one goes, counted from the first
  // one of its part.
  alignas(16) int32_t counts[kWindow];
  int32_t part_begins[kWarps];  // where each part's entries begin; before, how many there are
};
static_assert(sizeof(OrderStorage) <= 28 * 1024, "eight CTAs would fit a multiprocessor");

}  // namespace cupymla::invert_indices
