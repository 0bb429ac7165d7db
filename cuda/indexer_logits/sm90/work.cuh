// Which key tiles of which query tiles a CTA takes: all of them lie one after another, query tile by query tile, and a
// CTA takes every grid'th unit of them. All warps walk alike.
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

struct Walk {
  const Parameters& params;
  int64_t unit = blockIdx.x;
  int64_t step = 0;
  int64_t end = 0;  // of the unit's steps

  __device__ __forceinline__ explicit Walk(const Parameters& params) : params(params) { enter(); }

  // The next run; false where there is none.
  __device__ __forceinline__ bool next(Run& run) {
    if (step == end) {
      unit += gridDim.x;
      enter();
    }
    if (step >= params.steps) return false;
    const int64_t tile = step / params.key_tiles;
    const int64_t tile_end = (tile + 1) * params.key_tiles;
    const int64_t run_end = tile_end < end ? tile_end : end;
    run.batch = static_cast<int32_t>(tile / params.query_tiles);
    run.query_tile = static_cast<int32_t>(tile % params.query_tiles);
    run.first = static_cast<int32_t>(step - tile * params.key_tiles);
    run.end = static_cast<int32_t>(run_end - tile * params.key_tiles);
    step = run_end;
    return true;
  }

 private:
  __device__ __forceinline__ void enter() {
    step = unit * params.unit_steps;
    end = step + params.unit_steps;
    if (end > params.steps) end = params.steps;
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
