// Sums and extrema over the threads of a CTA.
#pragma once

#include "../../common/warp.cuh"
#include "storage.cuh"

namespace cupymla::topk {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Who a thread is.
struct Thread {
  const uint32_t index = threadIdx.x;
  const uint32_t threads = blockDim.x;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t warps = blockDim.x / 32;
};

struct Sum {
  uint32_t before;  // of the threads before this one
  uint32_t total;
};

// Running sums over all threads. Synchronised after.
__device__ __forceinline__ Sum block_scan(Storage& storage, const Thread& thread, uint32_t value) {
  const uint32_t inclusive = warp_scan(value, thread.lane);
  if (thread.lane == 31) storage.warp_sums[thread.warp] = inclusive;
  __syncthreads();
  const uint32_t warp_sum = static_cast<uint32_t>(thread.lane) < thread.warps ? storage.warp_sums[thread.lane] : 0u;
  __syncthreads();
  const uint32_t warps = warp_scan(warp_sum, thread.lane);
  const uint32_t warps_before = __shfl_sync(kAllLanes, warps - warp_sum, static_cast<int>(thread.warp));
  return {warps_before + inclusive - value, __shfl_sync(kAllLanes, warps, 31)};
}

// The least and the largest of all threads' keys. Synchronised after.
struct Extrema {
  uint32_t least, most;
};

__device__ __forceinline__ Extrema block_extrema(Storage& storage, const Thread& thread, Extrema own) {
  own.least = __reduce_min_sync(kAllLanes, own.least);
  own.most = __reduce_max_sync(kAllLanes, own.most);
  if (thread.lane == 0) {
    storage.warp_least[thread.warp] = own.least;
    storage.warp_most[thread.warp] = own.most;
  }
  __syncthreads();
  const bool there = static_cast<uint32_t>(thread.lane) < thread.warps;
  const uint32_t least = there ? storage.warp_least[thread.lane] : ~0u;
  const uint32_t most = there ? storage.warp_most[thread.lane] : 0u;
  __syncthreads();
  return {__reduce_min_sync(kAllLanes, least), __reduce_max_sync(kAllLanes, most)};
}

}  // namespace cupymla::topk
