// Puts each token's entries in ascending order, for Hopper and newer: `list` (invert_indices_list.cu) has left them in
// chance order. What is computed: `invert_indices` in cupymla/ops/invert_indices/reference.py.
//
// A CTA takes a group of tokens, each of its warps one of them. A warp puts its token's list in order where that is
// short. All warps take long ones together, one after the other. A batch entry is blockIdx.y.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "long_list.cuh"
#include "params.cuh"
#include "short_list.cuh"
#include "storage.cuh"

namespace cupymla::invert_indices {

struct Order {
  OrderStorage& storage;
  const Parameters& params;
  const int32_t batch = static_cast<int32_t>(blockIdx.y), all = all_entries(params);
  const int32_t* offsets = params.offsets + batch * params.offsets_batch;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  __device__ __forceinline__ void run() const {
    wait_for_primary_grid(false);
    clear_rest();
    const uint32_t tokens = static_cast<uint32_t>(params.s_kv), group = params.group_tokens;
    const uint32_t groups = (tokens + group - 1) / group;
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < groups; number += gridDim.x) {
      take_own(number * group + warp, static_cast<uint32_t>(warp) < group);
      __syncthreads();  // which lists are long
#pragma unroll 1
      for (uint32_t i = 0; i < group; ++i) {
        const int32_t length = storage.lengths[i], begin = storage.begins[i];
        if (length == 0) continue;
        const int32_t token = static_cast<int32_t>(number * group + i);
        LongList{storage, params, token, begin, length}.order();
      }
      __syncthreads();  // all have read which are
    }
  }

 private:
  // Where list `token` begins, or the last one ends, whatever has become of the offsets.
  __device__ __forceinline__ int32_t offset(uint32_t token) const { return max(0, min(offsets[token], all)); }

  // Puts the list of this warp's token in order, or says that it is long.
  __device__ __forceinline__ void take_own(uint32_t token, bool has_own) const {
    int32_t begin = 0, length = 0;
    if (has_own && token < static_cast<uint32_t>(params.s_kv)) {
      begin = __shfl_sync(0xffffffffu, offset(token), 0);
      length = max(0, __shfl_sync(0xffffffffu, offset(token + 1), 0) - begin);
    }
    const bool is_long = length > kShortList;
    if (lane == 0) storage.begins[warp] = begin, storage.lengths[warp] = is_long ? length : 0;
    if (length != 0 && !is_long) {
      const int32_t* list = scattered_of(params, batch) + begin;
      order_short_list(storage.short_lists[warp], list, entries_of(params, batch) + begin, length, lane);
    }
  }

  // Nothing is behind the last list.
  __device__ __forceinline__ void clear_rest() const {
    const uint32_t end = static_cast<uint32_t>(all), first = static_cast<uint32_t>(offset(params.s_kv));
    int32_t* entries = entries_of(params, batch);
    for (uint32_t i = first + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) entries[i] = -1;
  }
};

}  // namespace cupymla::invert_indices

extern "C" __global__ void __launch_bounds__(cupymla::invert_indices::kThreads, 6)
    invert_indices(const __grid_constant__ cupymla::invert_indices::Parameters params) {
  using namespace cupymla::invert_indices;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Order{*reinterpret_cast<OrderStorage*>(shared_memory), params}.run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::invert_indices::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::invert_indices::OrderStorage),
                     warps = cupymla::invert_indices::kWarps, short_list = cupymla::invert_indices::kShortList,
                     parameter_bytes = sizeof(cupymla::invert_indices::Parameters));
