// Which key tiles a CTA takes. All tiles of all requests lie one after another, request by request, and there query
// tile by query tile; each CTA takes as many, side by side. How many there are follows from the lengths, which every
// CTA adds up by itself.
#pragma once

#include "../../common/math.cuh"
#include "../../common/memory.cuh"
#include "../../common/tma.cuh"
#include "../../common/warp.cuh"
#include "lengths.cuh"
#include "storage.cuh"

namespace cupymla::paged_indexer {

__device__ __forceinline__ int32_t key_tiles(int32_t seen) {
  return static_cast<int32_t>((static_cast<uint32_t>(seen) + ThisConfig::kTileKeys - 1) / ThisConfig::kTileKeys);
}

// A CTA's tiles.
struct WorkAssignment {
  int32_t request;  // of the first one
  int32_t seen;     // keys of that request
  int64_t offset;   // of the first one, among those of the request's query tiles
  int64_t tiles;
};

// Prefetches bring into L2 what is needed once the lengths are known, while they are on their way. Nothing depends on
// what they guess.

__device__ __forceinline__ void prefetch_lengths(const Paged& paged, uint32_t thread) {
  if (thread >= static_cast<uint32_t>(paged.requests)) return;
  prefetch_l2(paged.context_lens + thread * paged.lens_request);
}

// Tables, for what is looked up in them depends on the lengths. Those that are large together are left alone: most of
// them may be beyond the lengths.
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

// By one warp: the first queries of the request that is this CTA's, if all are about as long.
__device__ __forceinline__ void prefetch_queries(const ScoringParameters& params, const TensorMap& q_map, int lane) {
  if (static_cast<uint32_t>(params.paged.requests) > gridDim.x) return;
  const int32_t request =
      static_cast<int32_t>(blockIdx.x * static_cast<uint32_t>(params.paged.requests) / gridDim.x);
  if (lane < ThisConfig::kColumnTiles) {
    tma_prefetch_4d(q_map, lane * ThisConfig::kSpan / ThisConfig::kElementBytes, 0, 0, request);
  }
#pragma unroll
  for (int first = 0; first < ThisConfig::kHeads; first += 32) {
    const int head = first + lane;
    if (head >= params.heads) break;
    const int64_t weight = request * params.weights_request + head * params.weights_head;
    prefetch_l2(params.weights + weight * (params.bf16_weights != 0 ? 2 : 4));
    if (params.q_scale == nullptr) continue;
    prefetch_l2(params.q_scale + request * params.q_scale_request + head * params.q_scale_head);
  }
}

// The block of a thread's key, of one request's alone, whose tiles are one to a CTA where that is enough; -1: none.
__device__ __forceinline__ int32_t guessed_block(const Paged& paged, uint32_t thread) {
  const uint32_t key = blockIdx.x * ThisConfig::kTileKeys + thread;
  const bool there =
      thread < ThisConfig::kTileKeys && paged.requests == 1 && key < static_cast<uint32_t>(paged.columns);
  return there ? paged.block_tables[key / static_cast<uint32_t>(paged.page) * paged.tables_block] : -1;
}

__device__ __forceinline__ void prefetch_key(const ScoringParameters& params, int32_t block, uint32_t thread) {
  if (static_cast<uint32_t>(block) >= static_cast<uint32_t>(params.paged.blocks)) return;
  const uint32_t place = (blockIdx.x * ThisConfig::kTileKeys + thread) % static_cast<uint32_t>(params.paged.page);
  const uint8_t* keys = params.cache + block * params.block_bytes;
#pragma unroll
  for (int first = 0; first < ThisConfig::kRowBytes; first += 128) {
    prefetch_l2(keys + place * params.row_bytes + first);
  }
  if constexpr (ThisConfig::kHasScales) prefetch_l2(keys + params.scales_offset + int64_t{place} * 4);
}

// Called by all lanes of a warp; each warp does the same. Tiles of all requests together are fewer than 2^32, for their
// scores lie in memory.
__device__ __forceinline__ WorkAssignment work_of_cta(const ScoringParameters& params) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int32_t requests = params.paged.requests;
  const int64_t query_tiles = params.query_tiles;
  // Neighbouring requests by each lane.
  const int32_t own_requests = static_cast<int32_t>((static_cast<uint32_t>(requests) + 31) / 32);
  int32_t first = min(lane * own_requests, requests);
  int32_t end = min(first + own_requests, requests);
  uint32_t own = 0;
  int32_t seen = 0;
#pragma unroll 1
  for (int32_t request = first; request < end; ++request) {
    seen = most_seen_keys(params.paged, request);
    own += static_cast<uint32_t>(key_tiles(seen));
  }
  uint32_t inclusive = warp_scan(own, lane);
  const int64_t total = __shfl_sync(0xffffffffu, inclusive, 31) * query_tiles;
  const int64_t each = quotient(total + gridDim.x - 1, gridDim.x);
  const int64_t begin = blockIdx.x * each;
  if (begin >= total) return {0, 0, 0, 0};
  // The lane that has the first tile's request, then the one of its requests.
  int64_t before = 0;
  int from = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, begin < inclusive * query_tiles))) - 1;
  if (own_requests > 1) {
    before = __shfl_sync(0xffffffffu, inclusive - own, from);
    end = __shfl_sync(0xffffffffu, end, from);
    first = __shfl_sync(0xffffffffu, first, from);
#pragma unroll 1
    for (;; first += 32) {
      seen = first + lane < end ? most_seen_keys(params.paged, first + lane) : 0;
      own = static_cast<uint32_t>(key_tiles(seen));
      inclusive = warp_scan(own, lane);
      const uint32_t lanes = __ballot_sync(0xffffffffu, begin < (before + inclusive) * query_tiles);
      from = __ffs(static_cast<int>(lanes)) - 1;
      if (lanes != 0) break;
      before += __shfl_sync(0xffffffffu, inclusive, 31);
    }
  } else {
    first = 0;
  }
  before += __shfl_sync(0xffffffffu, inclusive - own, from);
  const int64_t left = total - begin;
  seen = __shfl_sync(0xffffffffu, seen, from);
  return {first + from, seen, begin - before * query_tiles, left < each ? left : each};
}

// Neighbouring key tiles of one query tile.
struct Run {
  int32_t request, query_tile;
  int32_t seen;        // keys of the request
  int32_t first, end;  // key tiles

  __device__ __forceinline__ int32_t first_query() const { return query_tile * ThisConfig::kQueries; }
};

struct RunIterator {
  const ScoringParameters& params;
  int64_t left;       // tiles of the CTA
  int64_t offset;     // of the next one, among the request's
  int64_t remaining;  // of the request, from there on
  int32_t request;
  int32_t seen;       // keys of the request
  int32_t tiles;      // of a query tile of the request

  __device__ __forceinline__ RunIterator(const ScoringParameters& params, const WorkAssignment& work)
      : params(params), left(work.tiles), offset(work.offset), request(work.request) {
    enter(work.seen);
  }

  // The next run; false where there is none.
  __device__ __forceinline__ bool next(Run& run) {
    if (left == 0) return false;
    while (remaining == 0) {
      ++request;
      enter(most_seen_keys(params.paged, request));
    }
    run.request = request;
    run.seen = seen;
    run.query_tile = params.query_tiles == 1 ? 0 : static_cast<int32_t>(quotient(offset, tiles));
    run.first = static_cast<int32_t>(offset - static_cast<int64_t>(run.query_tile) * tiles);
    run.end = left < tiles - run.first ? run.first + static_cast<int32_t>(left) : tiles;
    const int32_t taken = run.end - run.first;
    left -= taken;
    remaining -= taken;
    offset = remaining == 0 ? 0 : offset + taken;
    return true;
  }

 private:
  __device__ __forceinline__ void enter(int32_t keys) {
    seen = keys;
    tiles = key_tiles(keys);
    remaining = static_cast<int64_t>(tiles) * params.query_tiles - offset;
  }
};

}  // namespace cupymla::paged_indexer
