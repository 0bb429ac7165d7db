// The counters of CTAs that have left their parts of a unit, in memory that launches share one after another.
//
// There are two sets of them, which launches use in turn, and each launch clears the one that the next will use. So no
// launch finds what another one left, not even where lengths changed under way and CTAs counted parts that never came.
// Whose turn it is says a number that every launch raises by kRound, whatever its grid: it works in graphs as well.
#pragma once

#include "../../common/counter.cuh"
#include "config.cuh"

namespace cupymla::xl_paged_attention {

// Word 0 counts launches, the sets begin at word 4.
constexpr uint32_t kRound = 4096;        // CTAs of a launch, at most
constexpr uint32_t kSetCounters = 2048;  // three for each CTA that has a part
constexpr uint32_t kMaxCtas = kSetCounters / 3;
constexpr uint32_t kArrivalsBytes = 4 * (4 + 2 * kSetCounters);
static_assert(kMaxCtas <= kRound);

__device__ __forceinline__ uint32_t* counter_set(uint32_t* arrivals, uint32_t launch) {
  return arrivals + 4 + launch % 2 * kSetCounters;
}

// By one thread of each CTA, once: asks whose turn it is, which `launch_of` tells from what comes. What the others of
// this launch have added does not matter: it is less than kRound until this CTA adds its part.
__device__ __forceinline__ uint32_t take_turn(uint32_t* arrivals) {
  const uint32_t found = load_relaxed(arrivals);
  add_relaxed(arrivals, blockIdx.x == 0 ? kRound - (gridDim.x - 1) : 1);
  return found;
}

__device__ __forceinline__ uint32_t launch_of(uint32_t found) { return found / kRound; }

// By a warp of each CTA: the counters of the next launch.
__device__ __forceinline__ void clear_next_set(uint32_t* arrivals, uint32_t launch) {
  uint4* const next = reinterpret_cast<uint4*>(counter_set(arrivals, launch + 1));
  for (uint32_t place = blockIdx.x * 32 + threadIdx.x % 32; place < kSetCounters / 4; place += gridDim.x * 32) {
    next[place] = uint4{};
  }
}

}  // namespace cupymla::xl_paged_attention
