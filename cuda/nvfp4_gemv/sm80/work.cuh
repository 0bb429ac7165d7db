// Who works on what: items of work to CTAs, tiles of rows and chunks of k to warps.
#pragma once

#include "config.cuh"
#include "params.cuh"
#include "places.cuh"

namespace cupymla::nvfp4_gemv {

// Rows of one batch whose sums the CTA's warps hold at the same time. Each tile of up to 16 rows belongs to `splits`
// warps, which take its chunks of k in turn.
template <class C>
struct Pass {
  uint32_t batch;
  int64_t first_row;
  int32_t rows;
  int32_t tile_rows;    // rows of every tile but the last, which may have fewer or none
  int32_t tiles_log2, splits;  // powers of two; as many tiles times splits as there are warps

  __device__ __forceinline__ Pass(uint32_t batch, int64_t first_row, int32_t rows)
      : batch(batch), first_row(first_row), rows(rows) {
    const int32_t wanted = (rows + C::kTileRows - 1) / C::kTileRows;
    tiles_log2 = wanted <= 1 ? 0 : 32 - __clz(wanted - 1);
    splits = C::kWarps >> tiles_log2;
    tile_rows = (rows + (1 << tiles_log2) - 1) >> tiles_log2;
  }

  // Warps s * tiles + t share tile t.
  __device__ __forceinline__ int32_t tile_of(int32_t warp) const { return warp & ((1 << tiles_log2) - 1); }
  __device__ __forceinline__ int32_t split_of(int32_t warp) const { return warp >> tiles_log2; }
};

// Walks over all passes of a CTA, in order.
template <class C>
class Passes {
 public:
  __device__ __forceinline__ explicit Passes(const Parameters& params) : params_(params), item_(blockIdx.x) { open(); }

  __device__ __forceinline__ bool done() const { return item_ >= params_.items; }
  __device__ __forceinline__ Pass<C> get() const { return Pass<C>(batch_, row_, rows()); }

  __device__ __forceinline__ void next() {
    row_ += rows();
    if (row_ == end_) {
      item_ += gridDim.x;
      open();
    }
  }

 private:
  // The rest of an item in passes of nearly equal size.
  __device__ __forceinline__ int32_t rows() const {
    const int64_t left = end_ - row_;
    if (left <= C::kPassRows) return static_cast<int32_t>(left);
    const int64_t passes = (left + C::kPassRows - 1) / C::kPassRows;
    return static_cast<int32_t>((left + passes - 1) / passes);
  }

  __device__ __forceinline__ void open() {
    if (done()) return;
    batch_ = item_ < params_.parts ? 0 : item_ / params_.parts;
    const uint32_t part = item_ - batch_ * params_.parts;
    row_ = part * params_.part_rows + min(part, params_.long_parts);
    end_ = row_ + params_.part_rows + (part < params_.long_parts ? 1 : 0);
  }

  const Parameters& params_;
  uint32_t item_;
  uint32_t batch_ = 0;
  int64_t row_ = 0, end_ = 0;
};

__device__ __forceinline__ int32_t chunks_of(const Parameters& params, int32_t chunk) {
  return static_cast<int32_t>((params.k + chunk - 1) / chunk);
}

}  // namespace cupymla::nvfp4_gemv
