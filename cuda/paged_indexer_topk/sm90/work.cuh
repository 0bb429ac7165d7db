// Which key tiles a CTA takes. All tiles of all requests lie one after another, request by request, and there query
// tile by query tile; each CTA takes as many, side by side. How many there are follows from the lengths, which every
// CTA adds up by itself.
#pragma once

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

// Called by all threads. `storage.start` is written by the thread that meets the first tile.
__device__ __forceinline__ Share share_of_cta(Storage& storage, const ScoringParameters& params) {
  const int32_t requests = params.paged.requests;
  const uint64_t query_tiles = static_cast<uint32_t>(params.query_tiles);
  constexpr int32_t kThreads = ThisConfig::kThreads;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const auto tiles_of = [&](int64_t request) -> uint64_t {
    if (request >= requests) return 0;
    return query_tiles * static_cast<uint32_t>(key_tiles(params, static_cast<int32_t>(request)));
  };
  uint64_t tiles = tiles_of(thread), own = tiles;
  for (int64_t request = int64_t{thread} + kThreads; request < requests; request += kThreads) own += tiles_of(request);
  Sum sum = block_scan(storage, own);
  const uint64_t total = sum.total;
  const uint64_t each = (total + gridDim.x - 1) / gridDim.x;
  const uint64_t first = blockIdx.x * each;
  if (first >= total) return {{0, 0}, 0};
  // Where there are no more requests than threads, all is known already.
  uint64_t before = 0;
  for (int64_t base = 0;;) {
    if (requests > kThreads) sum = block_scan(storage, tiles);
    const uint64_t begin = before + sum.before;
    if (begin <= first && first < begin + tiles) {
      storage.start = {static_cast<int32_t>(base + thread), static_cast<int64_t>(first - begin)};
    }
    before += sum.total;
    base += kThreads;
    if (before > first || base >= requests) break;
    tiles = tiles_of(base + thread);
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
  int64_t left;        // tiles of the CTA
  int64_t offset;      // among the request's
  int32_t request;
  int32_t tiles;       // of a query tile of the request
  int32_t next_tiles;  // of the next request, loaded ahead

  __device__ __forceinline__ RunIterator(const ScoringParameters& params, const Share& share)
      : params(params), left(share.tiles), offset(share.start.offset), request(share.start.request) {
    tiles = left == 0 ? 0 : key_tiles(params, request);
    next_tiles = left == 0 ? 0 : tiles_behind();
  }

  // The next run; false where there is none.
  __device__ __forceinline__ bool next(Run& run) {
    if (left == 0) return false;
    while (offset == static_cast<int64_t>(tiles) * params.query_tiles) {
      ++request;
      offset = 0;
      tiles = next_tiles;
      next_tiles = tiles_behind();
    }
    run.request = request;
    run.query_tile = static_cast<int32_t>(offset / tiles);
    run.first = static_cast<int32_t>(offset - static_cast<int64_t>(run.query_tile) * tiles);
    run.end = left < tiles - run.first ? run.first + static_cast<int32_t>(left) : tiles;
    offset += run.end - run.first;
    left -= run.end - run.first;
    return true;
  }

 private:
  __device__ __forceinline__ int32_t tiles_behind() const {
    return request + 1 < params.paged.requests ? key_tiles(params, request + 1) : 0;
  }
};

}  // namespace cupymla::paged_indexer
