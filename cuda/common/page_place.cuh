// Where a slot of a paged cache lies, without a division.
#pragma once

#include "types.cuh"

namespace cupymla {

struct PagePlace {
  uint32_t block, place;

  // `reciprocal` is (2^32 - 1) / page, so that the first block is the right one or the one before. Of slots below 2^31.
  __device__ __forceinline__ PagePlace(uint32_t slot, uint32_t page, uint32_t reciprocal)
      : block(__umulhi(slot, reciprocal)), place(slot - block * page) {
    if (place >= page) block += 1, place -= page;
  }
};

}  // namespace cupymla
