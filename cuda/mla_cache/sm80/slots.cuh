// Slots of a cache's tokens, for kernels that write: asked for long before they are used.
#pragma once

#include "../../common/load_if.cuh"
#include "../../common/types.cuh"

namespace cupymla::mla_cache {

// The two halves of a slot; the upper of one of 32 bits is 0, and both are where `slots` is null.
struct Slot {
  uint32_t low, high;

  __device__ __forceinline__ Slot(const uint8_t* slots, int64_t place, bool wide) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(slots) + (wide ? 2 * place : place);
    low = load_if(slots != nullptr, words);
    high = load_if(slots != nullptr && wide, words + 1);
  }

  // A cache has fewer than 2^31 slots, so no negative slot is one of them.
  __device__ __forceinline__ bool is_in(int64_t num_slots) const {
    return high == 0 && low < static_cast<uint32_t>(num_slots);
  }
};

}  // namespace cupymla::mla_cache
