// Puts each token's entries in ascending order, for Hopper and newer: `list` (invert_indices_list.cu) has left them by
// chunk of queries and token, in chance order. What is computed: `invert_indices` in
// cupymla/ops/invert_indices/reference.py.
//
// Chunks ascend, so a token's entries are those of its list in each chunk, one list after the other. A warp takes a
// group of tokens and a chunk: a lane finds the list of one token. Lists that no query has twice are put in order one
// after the other by counting, others several at a time by comparisons. All warps of the CTA take what is too long for
// that together, one after the other. A batch entry is blockIdx.y.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "counted_list.cuh"
#include "long_list.cuh"
#include "params.cuh"
#include "short_list.cuh"
#include "storage.cuh"

namespace cupymla::invert_indices {

struct Order {
  OrderStorage& storage;
  const Parameters& params;
  const int32_t batch = static_cast<int32_t>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  __device__ __forceinline__ void run() const {
    wait_for_primary_grid(false);
    const uint32_t tokens = static_cast<uint32_t>(params.s_kv);
    const uint32_t groups = (tokens + params.group_tokens - 1) / params.group_tokens, units = groups * params.chunks;
#pragma unroll 1
    for (uint32_t first = blockIdx.x * kWarps; first < units; first += gridDim.x * kWarps) {
      const bool has_long = take_own(first + warp, groups);
      if (!__syncthreads_or(has_long)) continue;  // which lists are long
#pragma unroll 1
      for (uint32_t other = 0; other < kWarps; ++other) {
        const WarpRoom& room = storage.rooms[other];
        const uint32_t chunk = (first + other) / groups;
#pragma unroll 1
        for (uint32_t left = room.long_lists; left != 0; left &= left - 1) {
          const ChunkList& list = room.lists[__ffs(static_cast<int>(left)) - 1];
          LongList{storage, params, first_query_of(params, chunk), list}.order();
        }
      }
      __syncthreads();  // all have read which are
    }
    clear_rest();
  }

 private:
  // Puts this warp's lists in order. Whether there are some that all warps have to.
  __device__ __forceinline__ bool take_own(uint32_t unit, uint32_t groups) const {
    const uint32_t chunk = unit / groups, token = unit % groups * params.group_tokens + static_cast<uint32_t>(lane);
    const bool has_own = chunk < params.chunks && static_cast<uint32_t>(lane) < params.group_tokens &&
                         token < static_cast<uint32_t>(params.s_kv);
    ChunkList own = {0, 0, 0, static_cast<int32_t>(token)};
    if (has_own) find(own, chunk, token);
    WarpRoom& room = storage.rooms[warp];
    const uint32_t first_query = first_query_of(params, chunk);
    const int32_t first_entry = static_cast<int32_t>(first_query) * params.topk;
    const int32_t* scattered = scattered_of(params, batch, first_query);
    int32_t* entries = entries_of(params, batch);
    const uint32_t queries = params.chunk_queries, chunk_entries = queries_of(params, chunk) * params.topk;
    const bool may_count = own.count >= kLeastCounted && static_cast<uint32_t>(own.count) <= queries;
    uint32_t counted = __ballot_sync(0xffffffffu, may_count && queries <= kCountedQueries);
#pragma unroll 1
    for (; counted != 0; counted &= counted - 1) {
      const int other = __ffs(static_cast<int>(counted)) - 1;
      const int32_t begin = __shfl_sync(0xffffffffu, own.begin, other), to = __shfl_sync(0xffffffffu, own.to, other);
      const int32_t count = __shfl_sync(0xffffffffu, own.count, other);
      const CountedList list{room, params, scattered + begin, count, chunk_entries, lane};
      if (list.order(entries + to, first_entry) && lane == other) own.count = 0;
    }
    const bool is_long = own.count > kShortList;
    const uint32_t long_lists = __ballot_sync(0xffffffffu, is_long);
    ChunkList short_list = own;
    if (is_long) short_list.count = 0;
    order_short_lists(room, scattered, entries, first_entry, short_list, lane);
    if (is_long) room.lists[lane] = own;
    if (lane == 0) room.long_lists = long_lists;
    return long_lists != 0;
  }

  // A token's list in a chunk. Before it are smaller tokens' lists in all chunks, and the token's own in chunks before.
  __device__ __forceinline__ void find(ChunkList& list, uint32_t chunk, uint32_t token) const {
    const int32_t* ends = row_ends_of(params, batch, 0) + token;
    const int32_t* own_end = ends + static_cast<int64_t>(chunk) * params.s_kv;
    const int32_t begin = token != 0 ? own_end[-1] : 0, end = own_end[0];
    uint32_t to = 0;
#pragma unroll 4
    for (uint32_t other = 0; other < params.chunks; ++other, ends += params.s_kv) {
      const bool is_before = other < chunk;
      if (is_before || token != 0) to += static_cast<uint32_t>(ends[is_before ? 0 : -1]);
    }
    const bool writes_offset = chunk == 0 && params.chunks > 1;
    if (writes_offset) params.offsets[batch * params.offsets_batch + token] = static_cast<int32_t>(to);
    // Whatever has become of the row ends.
    const int32_t room = static_cast<int32_t>(queries_of(params, chunk)) * params.topk;
    list.begin = max(0, min(begin, room));
    list.count = max(0, min(end, room) - list.begin);
    list.to = max(0, min(static_cast<int32_t>(to), all_entries(params) - list.count));
  }

  // Nothing is behind the last list.
  __device__ __forceinline__ void clear_rest() const {
    uint32_t valid = 0;
    const uint32_t chunks = params.s_kv != 0 ? params.chunks : 0;
#pragma unroll 1
    for (uint32_t chunk = lane; chunk < chunks; chunk += 32) {
      valid += static_cast<uint32_t>(row_ends_of(params, batch, chunk)[params.s_kv - 1]);
    }
    valid = __reduce_add_sync(0xffffffffu, valid);
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    if (is_first && params.chunks > 1) params.offsets[batch * params.offsets_batch + params.s_kv] = valid;
    const uint32_t end = static_cast<uint32_t>(all_entries(params));
    int32_t* entries = entries_of(params, batch);
    for (uint32_t i = min(valid, end) + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) {
      entries[i] = -1;
    }
  }
};

}  // namespace cupymla::invert_indices

extern "C" __global__ void __launch_bounds__(cupymla::invert_indices::kThreads, 5)
    invert_indices(const __grid_constant__ cupymla::invert_indices::Parameters params) {
  using namespace cupymla::invert_indices;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Order{*reinterpret_cast<OrderStorage*>(shared_memory), params}.run();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::invert_indices::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::invert_indices::OrderStorage),
                     warps = cupymla::invert_indices::kWarps, short_list = cupymla::invert_indices::kShortList,
                     parameter_bytes = sizeof(cupymla::invert_indices::Parameters));
