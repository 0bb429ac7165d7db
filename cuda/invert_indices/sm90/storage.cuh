// Shared memory of a CTA of `order`, and the sizes that it follows from.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::invert_indices {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kShortList = 128;         // entries that a warp puts in order by itself, at most
constexpr uint32_t kWindow = 4096;      // queries whose entries in a longer list are counted at a time
constexpr uint32_t kPart = kWindow / kWarps;  // of a window, whose counts a warp adds up
static_assert(kPart % 128 == 0, "a lane has four neighbouring counts at a time");

struct OrderStorage {
  alignas(16) int32_t short_lists[kWarps][kShortList];
  // By query of the window: how many entries it has in the list; then where its next one goes, counted from the first
  // one of its part.
  alignas(16) int32_t counts[kWindow];
  int32_t part_begins[kWarps];  // where each part's entries begin; before, how many there are
  int32_t begins[kWarps];       // of each warp's list, if it is long
  int32_t lengths[kWarps];      // of each warp's list, if it is long; 0 if it is not
};
static_assert(sizeof(OrderStorage) <= 28 * 1024, "eight CTAs would fit a multiprocessor");

}  // namespace cupymla::invert_indices
