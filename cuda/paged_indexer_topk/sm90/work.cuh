// Which key tiles a CTA takes. All tiles of all requests lie one after another, request by request, and there query
// tile by query tile; each CTA takes as many, side by side. How many there are follows from the lengths, which every
// CTA adds up by itself.
#pragma once

#include "../../common/math.cuh"
#include "../../common/memory.cuh"
#include "lengths.cuh"
#include "storage.cuh"

namespace cupymla::paged_indexer {

__device__ __forceinline__ int32_t key_tiles(const ScoringParameters& params, int32_t request) {
  return (most_seen_keys(params.paged, request) + ThisConfig::kTileKeys - 1) / ThisConfig::kTileKeys;
}

struct Sum {
  uint64_t before;  // of the threads before this one
  uint64_t total;
};

// Running sums over all threads. Synchronised after.
__device__ __forceinline__ Sum block_scan(Storage& storage, uint64_t value) {
  constexpr int kWarps = ThisConfig::kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint64_t inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t lower = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += lower;
  }
  if (lane == 31) storage.warp_sums[warp] = inclusive;
  __syncthreads();
  Sum sum{inclusive - value, 0};
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    const uint64_t all = storage.warp_sums[other];
    sum.total += all;
    if (other < warp) sum.before += all;
  }
  __syncthreads();
  return sum;
}

// A CTA's tiles.
struct Share {
  Start start;
  int64_t tiles;
};

// Brings tables into L2 while the lengths are on their way: what is looked up in them depends on those. Tables that are
// large together are left alone, for most of them may be beyond the lengths.
__device__ __forceinline__ void prefetch_tables(const Paged& paged) {
  constexpr uint32_t kMostLines = 2048, kLineBlocks = 32;
  const uint32_t blocks = (static_cast<uint32_t>(paged.columns) + paged.page - 1) / static_cast<uint32_t>(paged.page);
  const uint32_t lines = (blocks + kLineBlocks - 1) / kLineBlocks;
  if (lines > kMostLines || static_cast<uint32_t>(paged.requests) > kMostLines) return;
  const uint32_t line = blockIdx.x * ThisConfig::kThreads + threadIdx.x;
  const uint32_t all = lines * static_cast<uint32_t>(paged.requests);
  if (all > kMostLines || line >= all || paged.tables_block != 1) return;
  prefetch_l2(paged.block_tables + line / lines * paged.tables_request + line % lines * kLineBlocks);
}

// Called by all threads. `storage.start` is written by the thread that meets the first tile. Code that runs once is
// kept short: an SM that starts has to fetch it.
__device__ __forceinline__ Share share_of_cta(Storage& storage, const ScoringParameters& params) {
  const int32_t requests = params.paged.requests;
  constexpr int32_t kThreads = ThisConfig::kThreads;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  uint64_t own = 0;
#pragma unroll 1
  for (int64_t request = thread; request < requests; request += kThreads) {
    own += static_cast<uint32_t>(key_tiles(params, static_cast<int32_t>(request)));
  }
  Sum sum = block_scan(storage, own);
  // From here on tiles of keys times query tiles.
  const uint64_t query_tiles = static_cast<uint32_t>(params.query_tiles);
  const uint64_t total = sum.total * query_tiles;
  const uint64_t each = static_cast<uint64_t>(quotient(static_cast<int64_t>(total + gridDim.x - 1), gridDim.x));
  const uint64_t first = blockIdx.x * each;
  if (first >= total) return {{0, 0}, 0};
  // Where there are no more requests than threads, all is known already.
  uint64_t before = 0;
#pragma unroll 1
  for (int64_t base = 0;;) {
    if (requests > kThreads) {
      const bool there = base + thread < requests;
      own = there ? static_cast<uint32_t>(key_tiles(params, static_cast<int32_t>(base + thread))) : 0;
      sum = block_scan(storage, own);
    }
    const uint64_t begin = (before + sum.before) * query_tiles;
    if (begin <= first && first < begin + own * query_tiles) {
      storage.start = {static_cast<int32_t>(base + thread), static_cast<int64_t>(first - begin)};
    }
    before += sum.total;
    base += kThreads;
    if (before * query_tiles > first || base >= requests) break;
  }
  __syncthreads();
  return {storage.start, static_cast<int64_t>(total - first < each ? total - first : each)};
}

// Neighbouring key tiles of one query tile.
struct Run {
  int32_t request, query_tile;
  int32_t first, end;  // key tiles

  __device__ __forceinline__ int32_t first_query() const { return query_tile * ThisConfig::kQueries; }
};

struct RunIterator {
  const ScoringParameters& params;
  int64_t left;         // tiles of the CTA
  int64_t offset;       // of the next one, among the request's
  int64_t remaining;    // of the request, from there on
  int32_t request;
  int32_t tiles;        // of a query tile of the request

  __device__ __forceinline__ RunIterator(const ScoringParameters& params, const Share& share)
      : params(params),
        left(share.tiles),
        offset(share.start.offset),
        remaining(0),
        request(share.start.request - 1),
        tiles(0) {}

  // The next run; false where there is none.
  __device__ __forceinline__ bool next(Run& run) {
    if (left == 0) return false;
    while (remaining == 0) {
      tiles = key_tiles(params, ++request);
      remaining = static_cast<int64_t>(tiles) * params.query_tiles - offset;
    }
    run.request = request;
    run.query_tile = static_cast<int32_t>(quotient(offset, tiles));
    run.first = static_cast<int32_t>(offset - static_cast<int64_t>(run.query_tile) * tiles);
    run.end = left < tiles - run.first ? run.first + static_cast<int32_t>(left) : tiles;
    const int32_t taken = run.end - run.first;
    left -= taken;
    remaining -= taken;
    offset = remaining == 0 ? 0 : offset + taken;
    return true;
  }
};

}  // namespace cupymla::paged_indexer
