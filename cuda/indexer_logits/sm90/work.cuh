// Which key tiles of which query tiles a CTA takes. All of them lie one after another, query tile by query tile, in
// units. In each round every CTA takes one unit, and in the next round the place of its right neighbour. Were it always
// the same place, a CTA could get the first keys of all query tiles, which a causal mask leaves visible, and another
// one the last. All warps iterate alike.
#pragma once

#include "params.cuh"
#include "storage.cuh"

namespace cupymla::indexer_logits {

// Neighbouring key tiles of one query tile.
struct Run {
  int32_t batch, query_tile;
  int32_t first, end;  // key tiles

  __device__ __forceinline__ int32_t first_query() const { return query_tile * ThisConfig::kQueries; }
};

struct RunIterator {
  const Parameters& params;
  uint32_t round = 0;
  int32_t left = 0;  // steps of the unit
  int64_t step = 0;

  __device__ __forceinline__ explicit RunIterator(const Parameters& params) : params(params) { enter(); }

  // The next run; false where there is none.
  __device__ __forceinline__ bool next(Run& run) {
    if (left == 0) {
      ++round;
      enter();
    }
    if (left == 0) return false;
    const int64_t tile = step / params.key_tiles;
    run.batch = static_cast<int32_t>(tile / params.query_tiles);
    run.query_tile = static_cast<int32_t>(tile % params.query_tiles);
    run.first = static_cast<int32_t>(step - tile * params.key_tiles);
    run.end = min(run.first + left, params.key_tiles);
    left -= run.end - run.first;
    step += run.end - run.first;
    return true;
  }

 private:
  __device__ __forceinline__ void enter() {
    const int64_t unit = static_cast<int64_t>(round) * gridDim.x + (blockIdx.x + round) % gridDim.x;
    step = unit * params.unit_steps;
    const int64_t steps = params.steps - step;
    left = static_cast<int32_t>(steps < 0 ? 0 : steps < params.unit_steps ? steps : params.unit_steps);
  }
};

// Key tiles of a run that some query sees, and those around them.
struct Visible {
  int32_t first, end;

  __device__ __forceinline__ Visible(const Run& run, const Bounds& any) {
    first = max(run.first, any.begin / ThisConfig::kKeyRows);
    end = min(run.end, (any.end + ThisConfig::kKeyRows - 1) / ThisConfig::kKeyRows);
    if (any.begin >= any.end || first >= end) first = end = run.end;
  }
};

}  // namespace cupymla::indexer_logits
