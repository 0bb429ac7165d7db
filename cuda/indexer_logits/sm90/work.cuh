// Which key tiles of which query tiles a CTA takes. Query tiles lie one after another on a line, each as long as it
// costs: its beginning, key tiles that some query sees, and those that are filled with -inf. Every CTA takes an equal
// part of the line.
#pragma once

#include "../../common/indexer_score.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::indexer_logits {

// Lengths on the line. A key tile is filled in about an eighth of the time in which it is scored.
constexpr int32_t kBeginning = 8, kScored = 8, kFilled = 1;

__device__ __forceinline__ Bounds visible_keys(const Parameters& params, int32_t batch, int32_t query) {
  Bounds bounds{0, params.keys};
  if (params.starts != nullptr) {
    bounds.begin = max(0, params.starts[batch * params.starts_batch + query * params.starts_query]);
  }
  if (params.ends != nullptr) {
    bounds.end = min(bounds.end, params.ends[batch * params.ends_batch + query * params.ends_query]);
  }
  if (params.causal != 0) bounds.end = indexer::causal_end(params.q_start, query, params.k_stride, bounds.end);
  if (bounds.begin >= bounds.end) bounds = {0, 0};
  return bounds;
}

// Key tiles of a query tile, and where they are on its part of the line.
struct Extent {
  int32_t first = 0, end = 0;  // that some query sees, and those between them
  int32_t filled = 0;          // those around them, where they are filled

  // `any`: from the first to the last key that any query of the tile sees.
  __device__ __forceinline__ Extent(const Bounds& any, const Parameters& params) {
    if (any.begin < any.end) {
      first = any.begin / ThisConfig::kKeyRows;
      end = (any.end + ThisConfig::kKeyRows - 1) / ThisConfig::kKeyRows;
    }
    if (params.fills != 0) filled = params.key_tiles - scored();
  }

  __device__ __forceinline__ int32_t scored() const { return end - first; }
  __device__ __forceinline__ int64_t beginning() const { return end > first ? kBeginning : 0; }
  __device__ __forceinline__ int64_t length() const {
    return beginning() + static_cast<int64_t>(scored()) * kScored + static_cast<int64_t>(filled) * kFilled;
  }

  // Tiles that begin before a place.
  __device__ __forceinline__ int32_t scored_before(int64_t place) const {
    const int64_t behind = place - beginning();
    return behind <= 0 ? 0 : static_cast<int32_t>(min((behind + kScored - 1) / kScored, int64_t{scored()}));
  }
  __device__ __forceinline__ int32_t filled_before(int64_t place) const {
    const int64_t behind = place - beginning() - static_cast<int64_t>(scored()) * kScored;
    return behind <= 0 ? 0 : static_cast<int32_t>(min((behind + kFilled - 1) / kFilled, int64_t{filled}));
  }
};

__device__ __forceinline__ Extent extent_of(const Parameters& params, int32_t batch, int32_t query_tile) {
  const int32_t first = query_tile * ThisConfig::kQueries;
  const int32_t last = min(first + ThisConfig::kQueries, params.queries) - 1;
  // Limits of their own aside, the last query sees all that the others see.
  const bool has_limits = params.starts != nullptr || params.ends != nullptr;
  Bounds any{params.keys, 0};
#pragma unroll 4
  for (int32_t query = has_limits ? first : last; query <= last; ++query) {
    const Bounds own = visible_keys(params, batch, query);
    if (own.begin < own.end) any = {min(any.begin, own.begin), max(any.end, own.end)};
  }
  return {any, params};
}

// Finds this CTA's part of the line. All threads call it.
__device__ __forceinline__ void find_work(Storage& storage, const Parameters& params) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t tiles = static_cast<int64_t>(params.batch) * params.query_tiles;
  const int64_t each = (tiles + ThisConfig::kThreads - 1) / ThisConfig::kThreads;
  const int64_t first = min(thread * each, tiles);
  const int32_t own_tiles = static_cast<int32_t>(min(each, tiles - first));
  const WorkAssignment own{static_cast<int32_t>(first / params.query_tiles),
                           static_cast<int32_t>(first % params.query_tiles), 0, 0};

  int64_t length = 0;
  WorkAssignment tile = own;
  for (int32_t i = 0; i < own_tiles; ++i, tile.advance(params.query_tiles)) {
    length += extent_of(params, tile.batch, tile.query_tile).length();
  }
  int64_t up_to = length;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, up_to, offset);
    if (lane >= offset) up_to += before;
  }
  if (lane == 31) storage.warp_lengths[warp] = up_to;
  if (thread == 0) storage.work = {0, 0, 0, 0};
  __syncthreads();
  int64_t all = 0;
  for (int i = 0; i < ThisConfig::kThreads / 32; ++i) {
    const int64_t theirs = storage.warp_lengths[i];
    if (i < warp) up_to += theirs;
    all += theirs;
  }
  const int64_t begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
  int64_t at = up_to - length;
  if (begin < end && at <= begin && begin < up_to) {
    for (tile = own;; tile.advance(params.query_tiles)) {
      const int64_t here = extent_of(params, tile.batch, tile.query_tile).length();
      if (begin < at + here) break;
      at += here;
    }
    storage.work = {tile.batch, tile.query_tile, begin - at, end - begin};
  }
  __syncthreads();
}

}  // namespace cupymla::indexer_logits
