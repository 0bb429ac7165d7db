// Who works on what: items of work to CTAs, tiles of rows and chunks of k to warps.
#pragma once

#include "config.cuh"
#include "params.cuh"
#include "places.cuh"

namespace cupymla::nvfp4_gemv {

// Rows of one batch whose sums the CTA's warps hold at the same time. Each tile of up to 16 rows belongs to `splits`
// warps, which take its chunks of k in turn. Chunks are assigned to groups of at least four warps, one on each
// scheduler, and in a group to its splits: a group needs no other part of b than its own chunks'.
template <class C>
struct Pass {
  static constexpr int32_t kMostGroupsLog2 = C::kWarps == 16 ? 2 : 1;
  static_assert(C::kWarps >> kMostGroupsLog2 == 4);

  uint32_t batch;
  int64_t first_row;
  int32_t rows;
  int32_t tile_rows;    // rows of every tile but the last, which may have fewer or none
  int32_t tiles_log2, splits;  // powers of two; as many tiles times splits as there are warps
  int32_t groups_log2;

  __device__ __forceinline__ Pass(uint32_t batch, int64_t first_row, int32_t rows)
      : batch(batch), first_row(first_row), rows(rows) {
    const int32_t wanted = (rows + C::kTileRows - 1) / C::kTileRows;
    tiles_log2 = wanted <= 1 ? 0 : 32 - __clz(wanted - 1);
    splits = C::kWarps >> tiles_log2;
    tile_rows = (rows + (1 << tiles_log2) - 1) >> tiles_log2;
    groups_log2 = min(kMostGroupsLog2, C::kWarpsLog2 - tiles_log2);
  }

  // Warps t, t + tiles, t + 2 tiles ... share tile t.
  __device__ __forceinline__ int32_t tile_of(int32_t warp) const { return warp & ((1 << tiles_log2) - 1); }
  __device__ __forceinline__ int32_t group_of(int32_t warp) const { return warp >> (C::kWarpsLog2 - groups_log2); }
  __device__ __forceinline__ int32_t group_threads() const { return C::kThreads >> groups_log2; }
  // The first chunk of a warp, which then takes every `splits`-th.
  __device__ __forceinline__ int32_t split_of(int32_t warp) const {
    const int32_t in_group = warp & ((C::kWarps >> groups_log2) - 1);
    return (in_group >> tiles_log2 << groups_log2) + group_of(warp);
  }
};

// Walks over all passes of a CTA, in order. Only a division is kept; rows are worked out where they are asked for.
template <class C>
class Passes {
 public:
  __device__ __forceinline__ explicit Passes(const Parameters& params)
      : params_(params), item_(blockIdx.x), batch_(batch_of(params, blockIdx.x)) {}

  __device__ __forceinline__ bool done() const { return item_ >= params_.items; }

  // Whether no pass follows.
  __device__ __forceinline__ bool last() const {
    const int64_t rows = this->rows();
    return params_.items - item_ <= gridDim.x && (rows <= C::kPassRows || index_ + 1 >= passes_of(rows));
  }

  // An item with more rows than warps can hold sums of is assigned to passes of nearly equal size.
  __device__ __forceinline__ Pass<C> get() const {
    const uint32_t part = item_ - batch_ * params_.parts;
    const int64_t row = part * params_.part_rows + min(part, params_.long_parts), rows = this->rows();
    if (rows <= C::kPassRows) return Pass<C>(batch_, row, static_cast<int32_t>(rows));
    const int64_t passes = passes_of(rows), most = rows / passes, longer = rows - most * passes;
    return Pass<C>(batch_, row + index_ * most + min(static_cast<int64_t>(index_), longer),
                   static_cast<int32_t>(most + (index_ < longer ? 1 : 0)));
  }

  __device__ __forceinline__ void next() {
    const int64_t rows = this->rows();
    if (rows > C::kPassRows && ++index_ < passes_of(rows)) return;
    index_ = 0;
    item_ += gridDim.x;
    batch_ = batch_of(params_, item_);
  }

 private:
  static __device__ __forceinline__ uint32_t batch_of(const Parameters& params, uint32_t item) {
    return item < params.parts ? 0 : item / params.parts;
  }
  // Of the item.
  __device__ __forceinline__ int64_t rows() const {
    return params_.part_rows + (item_ - batch_ * params_.parts < params_.long_parts ? 1 : 0);
  }
  static __device__ __forceinline__ int64_t passes_of(int64_t rows) { return (rows + C::kPassRows - 1) / C::kPassRows; }

  const Parameters& params_;
  uint32_t item_, batch_;
  uint32_t index_ = 0;  // of the pass in its item
};

__device__ __forceinline__ int32_t chunks_of(const Parameters& params, int32_t chunk) {
  return static_cast<int32_t>((static_cast<uint64_t>(params.k) + chunk - 1) / chunk);
}

}  // namespace cupymla::nvfp4_gemv
