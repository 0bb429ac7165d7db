// A short list put in order by a warp: every entry's rank is the number of smaller ones.
#pragma once

#include "storage.cuh"

namespace cupymla::invert_indices {

// Writes to `ordered` what `list` has, `count` entries of which no two are equal, in ascending order; `room` is the
// warp's. All lanes take part.
__device__ __forceinline__ void order_short_list(int32_t (&room)[kShortList], const int32_t* list, int32_t* ordered,
                                                 int32_t count, int lane) {
  const int32_t whole = (count + 3) / 4 * 4;
  for (int32_t i = lane; i < whole; i += 32) room[i] = i < count ? list[i] : INT32_MAX;  // which is below none
  __syncwarp();
#pragma unroll 1
  for (int32_t i = lane; i < count; i += 32) {
    const int32_t own = room[i];
    int32_t rank = 0;
#pragma unroll 4
    for (int32_t j = 0; j < whole; j += 4) {
      const int4 others = *reinterpret_cast<const int4*>(room + j);
      rank += (others.x < own) + (others.y < own) + (others.z < own) + (others.w < own);
    }
    ordered[rank] = own;
  }
  __syncwarp();  // the room may be written again
}

}  // namespace cupymla::invert_indices
