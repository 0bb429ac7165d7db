// A token's list in a chunk of queries, a long one, put in order by a CTA, window by window of the chunk's queries:
//
//   count   how many of the list's entries each query of the window has: one, but for a token that it names again
//   begin   where each query's run of entries begins
//   place   the entries, each into its query's run
//   repair  runs of several entries, whose order is left to chance by `place`
//
// The entries of a window are found in the list, or, where that is longer than all rows of the window, in these. So to
// go through all windows once takes no more reads than the chunk has entries, however long the list is.
//
// Queries and entries are counted from the chunk's first ones until an entry is written.
#pragma once

#include "../../common/page_place.cuh"
#include "../../common/warp.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::invert_indices {

struct LongList {
  OrderStorage& storage;
  const Parameters& params;
  const uint32_t first_query;  // of the chunk
  const ChunkList& list;       // in shared memory
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  // All threads take part.
  __device__ __forceinline__ void order() const {
    const uint32_t all_queries = min(params.chunk_queries, static_cast<uint32_t>(params.s_q) - first_query);
    int32_t done = 0;  // entries of the windows before
#pragma unroll 1
    for (uint32_t first = 0; first < all_queries && done < list.count; first += kWindow) {
      const uint32_t queries = min(kWindow, all_queries - first);
      // As far as `begin_runs` reads.
      for (uint32_t i = threadIdx.x * 4; i < (queries + 127) / 128 * 128; i += kThreads * 4) {
        *reinterpret_cast<int4*>(storage.counts + i) = make_int4(0, 0, 0, 0);
      }
      __syncthreads();  // zeros are there
      for_each_entry(first, queries, [&](int32_t, uint32_t query) { atomicAdd(storage.counts + query, 1); });
      __syncthreads();  // counts are there
      const bool repeated = begin_runs(queries);
      __syncthreads();  // parts are counted
      const int32_t all = begin_parts();
      __syncthreads();  // where parts begin
      for_each_entry(first, queries, [&](int32_t entry, uint32_t query) {
        const int32_t place = done + storage.part_begins[query / kPart] + atomicAdd(storage.counts + query, 1);
        // Another kernel may have changed the indices meanwhile: then lists are wrong, but nothing else.
        if (static_cast<uint32_t>(place) < static_cast<uint32_t>(list.count)) write(place, entry);
      });
      if (__syncthreads_or(repeated)) {  // entries are placed
        repair_runs(first, queries, done);
        __syncthreads();  // counts are read
      }
      done += all;
    }
  }

 private:
  static __device__ __forceinline__ int32_t batch() { return static_cast<int32_t>(blockIdx.y); }

  // The list in chance order, and where it goes: both are worked out where they are used, since registers are few.
  __device__ __forceinline__ const int32_t* scattered() const {
    return scattered_of(params, batch(), first_query) + list.begin;
  }
  __device__ __forceinline__ int32_t* ordered() const { return entries_of(params, batch()) + list.to; }

  __device__ __forceinline__ void write(int32_t place, int32_t entry) const {
    ordered()[place] = static_cast<int32_t>(first_query) * params.topk + entry;
  }

  // Calls `take` with each entry of a window and its query, counted from the first one.
  template <typename Take>
  __device__ __forceinline__ void for_each_entry(uint32_t first, uint32_t queries, Take take) const {
    const uint32_t topk = static_cast<uint32_t>(params.topk), room = queries * topk;
    const int32_t count = list.count;
    if (static_cast<uint32_t>(count) > room) {
      for_each_in_rows(first, room, take);
      return;
    }
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int32_t base = static_cast<int32_t>(threadIdx.x); base < count; base += kThreads * kAtOnce) {
      int32_t own[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t place = base + i * kThreads;
        own[i] = place < count ? scattered()[place] : -1;  // which is in no window
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t place = static_cast<uint32_t>(own[i]) - first * topk;
        if (place < room) take(own[i], PagePlace(place, topk, params.topk_reciprocal).block);
      }
    }
  }

  template <typename Take>
  __device__ __forceinline__ void for_each_in_rows(uint32_t first, uint32_t room, Take take) const {
    const uint32_t topk = static_cast<uint32_t>(params.topk);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < room; i += kThreads) {
      const PagePlace at(i, topk, params.topk_reciprocal);
      const int32_t query = static_cast<int32_t>(first + at.block), place = static_cast<int32_t>(at.place);
      if (place < length(query) && row(query)[place] == list.token) {
        take(static_cast<int32_t>(first * topk + i), at.block);
      }
    }
  }

  __device__ __forceinline__ const int32_t* row(int32_t query) const {
    const int64_t number = static_cast<int64_t>(first_query) + query;
    return params.indices + batch() * params.indices_batch + number * params.indices_query;
  }
  __device__ __forceinline__ int32_t length(int32_t query) const {
    return length_of(params, batch(), static_cast<int32_t>(first_query) + query);
  }

  // Makes the counts of this warp's part where runs begin. Whether a query has several entries.
  __device__ __forceinline__ bool begin_runs(uint32_t queries) const {
    int32_t before = 0;
    bool repeated = false;
#pragma unroll 2  // registers are few where five CTAs share a multiprocessor
    for (uint32_t i = 0; i < kPart && warp * kPart + i < queries; i += 128) {
      int4& own = *reinterpret_cast<int4*>(storage.counts + warp * kPart + i + lane * 4);
      const int4 counts = own;
      const int32_t all = counts.x + counts.y + counts.z + counts.w;
      repeated |= counts.x > 1 || counts.y > 1 || counts.z > 1 || counts.w > 1;
      const int32_t inclusive = static_cast<int32_t>(warp_scan(static_cast<uint32_t>(all), lane));
      const int32_t begin = before + inclusive - all;
      own = make_int4(begin, begin + counts.x, begin + counts.x + counts.y, begin + counts.x + counts.y + counts.z);
      before += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane == 0) storage.part_begins[warp] = before;
    return repeated;
  }

  // Makes what each part has where it begins. How many entries the window has.
  __device__ __forceinline__ int32_t begin_parts() const {
    int32_t before = 0, all = 0;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      const int32_t own = storage.part_begins[part];
      if (part < warp) before += own;
      all += own;
    }
    __syncthreads();  // all have read
    if (lane == 0) storage.part_begins[warp] = before;
    return all;
  }

  // Where a query's run begins, and where it ends, once entries are placed; in the window.
  __device__ __forceinline__ int32_t run_begin(uint32_t query) const {
    return storage.part_begins[query / kPart] + (query % kPart == 0 ? 0 : storage.counts[query - 1]);
  }
  __device__ __forceinline__ int32_t run_end(uint32_t query) const {
    return storage.part_begins[query / kPart] + storage.counts[query];
  }

  // Runs of several entries; `done`: entries before the window.
  __device__ __forceinline__ void repair_runs(uint32_t first, uint32_t queries, int32_t done) const {
#pragma unroll 1
    for (uint32_t some = warp * 32; some < queries; some += kThreads) {
      uint32_t runs = __ballot_sync(0xffffffffu, run_end(some + lane) - run_begin(some + lane) > 1);
#pragma unroll 1
      for (; runs != 0; runs &= runs - 1) {
        const uint32_t query = some + __ffs(static_cast<int>(runs)) - 1;
        const int32_t from = done + run_begin(query), to = min(done + run_end(query), list.count);
        if (to - from <= 32) {
          order_run(from, to - from);
        } else {
          read_run(static_cast<int32_t>(first + query), from, to);
        }
      }
    }
  }

  // Puts a run of up to 32 entries in order.
  __device__ __forceinline__ void order_run(int32_t from, int32_t length) const {
    const int32_t own = lane < length ? ordered()[from + lane] : INT32_MAX;
    int32_t rank = 0;
#pragma unroll 1
    for (int32_t i = 0; i < length; ++i) rank += __shfl_sync(0xffffffffu, own, i) < own;
    __syncwarp();  // all have read
    if (lane < length) ordered()[from + rank] = own;
  }

  // Writes a longer run anew, from the query's row.
  __device__ __forceinline__ void read_run(int32_t query, int32_t from, int32_t end) const {
    const int32_t entries = __shfl_sync(0xffffffffu, length(query), 0);
    const int32_t* indices = row(query);
    constexpr int kAtOnce = 2;
#pragma unroll 1
    for (int32_t base = 0; base < entries && from < end; base += 32 * kAtOnce) {
      bool names[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t place = base + i * 32 + lane;
        names[i] = place < entries && indices[place] == list.token;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t all = __ballot_sync(0xffffffffu, names[i]);
        const int32_t to = from + __popc(all & ((1u << lane) - 1));
        if (names[i] && to < end) write(to, query * params.topk + base + i * 32 + lane);
        from += __popc(all);
      }
    }
  }
};

}  // namespace cupymla::invert_indices
