// Stage `total`: what all entries together add to a key's row of dk at most; see fixed_point.cuh.
//
// L2 takes one reduction of an entry as long as one of a whole sector. So a CTA adds up many entries in shared memory
// before it adds to the totals in L2: those of a range of keys, which takes the entries of some queries. CTAs of other
// ranges read the same entries again, out of L2, where all run together.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/integer_reduction.cuh"
#include "../../common/registers.cuh"
#include "fixed_point.cuh"
#include "query.cuh"

namespace cupymla::indexer_bwd {

constexpr int kTotalThreads = 1024;
constexpr int kMostRangeKeys = 28672;  // mirrored in plan.py
constexpr int kEntriesAtOnce = 8;      // of a thread: as many reads are under way
constexpr int kPartEntries = 512;      // of a query, which a warp takes

// Shared memory has no additions of 64 bits but loops. So a total is in two words.
struct TotalStorage {
  uint32_t low[kMostRangeKeys], high[kMostRangeKeys];
};

struct Totals {
  TotalStorage& storage;
  const Parameters& params;
  const int32_t ranges, groups;       // a group of CTAs, one for each range, takes the same queries
  const int32_t batch, range, group;  // of this CTA
  const uint32_t first_key, keys;     // of its range

  __device__ __forceinline__ Totals(TotalStorage& storage, const Parameters& params)
      : storage(storage),
        params(params),
        ranges(params.range_keys == 0 ? 1 : (params.keys + params.range_keys - 1) / params.range_keys),
        groups(static_cast<int32_t>(gridDim.x) / (params.batch * ranges)),
        batch(static_cast<int32_t>(blockIdx.x) / (ranges * groups)),
        range(static_cast<int32_t>(blockIdx.x) % ranges),
        group(static_cast<int32_t>(blockIdx.x) / ranges % groups),
        first_key(static_cast<uint32_t>(range) * static_cast<uint32_t>(params.range_keys)),
        keys(min(static_cast<uint32_t>(params.range_keys), static_cast<uint32_t>(params.keys) - first_key)) {}

  __device__ __forceinline__ void run() const {
    const bool in_shared = params.range_keys != 0;
    if (in_shared) {
      for (uint32_t key = threadIdx.x; key < keys; key += kTotalThreads) storage.low[key] = storage.high[key] = 0;
      __syncthreads();  // zeros are there
      add<true>();
      __syncthreads();  // everybody has added
      flush();
    } else {
      add<false>();
    }
  }

 private:
  __device__ __forceinline__ int64_t* totals() const {
    return params.totals + static_cast<int64_t>(batch) * params.keys;
  }

  // Adds the bounds of this group's entries to the totals of their keys. A warp takes a part of a query at a time.
  template <bool kInShared>
  __device__ __forceinline__ void add() const {
    const double to_units = wide_power_of_two(-total_unit_log2(params.largest[batch], params.adds_log2));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t place = smem_address(storage.low);
    make_opaque(place);  // computed anew for each entry, it took a read of a special register
    // Together at most 2^29 entries, see `adds_log2`.
    const uint32_t parts = (static_cast<uint32_t>(params.topk) + kPartEntries - 1) / kPartEntries;
    const uint32_t all = static_cast<uint32_t>(params.queries) * parts;
    const uint32_t step = static_cast<uint32_t>(groups) * (kTotalThreads / 32);
#pragma unroll 1
    for (uint32_t item = group + threadIdx.x / 32 * groups; item < all; item += step) {
      const Query query(params, batch, static_cast<int32_t>(item / parts));
      const float query_bound = params.query_bounds[static_cast<int64_t>(batch) * params.queries + query.query];
      const int32_t begin = static_cast<int32_t>(item % parts) * kPartEntries;
#pragma unroll 1
      for (int32_t first = begin; first < min(begin + kPartEntries, query.entries); first += 32 * kEntriesAtOnce) {
        int32_t ids[kEntriesAtOnce];
        float gradients[kEntriesAtOnce];
#pragma unroll
        for (int i = 0; i < kEntriesAtOnce; ++i) {
          const int32_t entry = first + i * 32 + lane;
          ids[i] = query.key_of(entry);
          gradients[i] = entry < query.entries ? query.gradients[entry] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kEntriesAtOnce; i += 4) {
          add_entries<kInShared, 4>(ids + i, gradients + i, query_bound, to_units, place);
        }
      }
    }
  }

  // The additions of lower words are all under way before a carry is waited for.
  template <bool kInShared, int kEntries>
  __device__ __forceinline__ void add_entries(const int32_t* ids, const float* gradients, float query_bound,
                                              double to_units, uint32_t place) const {
    uint32_t places[kEntries], low[kEntries], high[kEntries], before[kEntries];
    bool wanted[kEntries];
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int64_t units = __double2ll_ru(entry_bound(gradients[i], query_bound) * to_units);
      wanted[i] = ids[i] >= 0 && is_finite(gradients[i]);
      if constexpr (kInShared) {
        const uint32_t key = static_cast<uint32_t>(ids[i]) - first_key;
        low[i] = static_cast<uint32_t>(units);
        high[i] = static_cast<uint32_t>(static_cast<uint64_t>(units) >> 32);
        places[i] = place + key * 4;
        wanted[i] = wanted[i] && key < keys;
        before[i] = 0;
        if (wanted[i]) before[i] = shared_add(places[i], low[i]);
      } else {
        if (wanted[i]) reduce_add_int64(totals() + ids[i], units);
      }
    }
    if constexpr (kInShared) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const uint32_t more = high[i] + (before[i] + low[i] < low[i] ? 1 : 0);
        if (wanted[i] && more != 0) shared_add(places[i] + sizeof(storage.low), more);
      }
    }
  }

  // Adds the range's totals to those in L2. Groups begin in different places, so that they meet less.
  __device__ __forceinline__ void flush() const {
    const uint32_t begin = static_cast<uint32_t>(static_cast<uint64_t>(keys) * group / groups) / 32 * 32;
    for (uint32_t i = threadIdx.x; i < keys; i += kTotalThreads) {
      const uint32_t key = begin + i < keys ? begin + i : begin + i - keys;
      const uint64_t total = static_cast<uint64_t>(storage.high[key]) << 32 | storage.low[key];
      if (total != 0) reduce_add_int64(totals() + first_key + key, static_cast<int64_t>(total));
    }
  }
};

}  // namespace cupymla::indexer_bwd
