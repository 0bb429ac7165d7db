// Brings in a and its scales for whole calls: every warp copies the stages of its only tile.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/async_copy.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// As Stream. kByRows: scales are copied a row per lane, else four per lane, twice with NVFP4.
template <class C, bool kByRows>
class WholeStream {
 public:
  __device__ __forceinline__ WholeStream(const Parameters& params, const Pass<C>& pass, int32_t warp)
      : policy_(l2_policy_evict_first()), chunks_(chunks_of(params, C::kChunk)), splits_(pass.splits),
        scale_step_(pass.splits * (params.swizzled ? kRowWords * 512 : C::kRowScales)),
        four_rows_(kRowsAtOnce * params.a_row_bytes), chunk_(pass.split_of(warp)) {
    make_opaque(four_rows_);
  }

  // Works out where this lane's first pieces are. To be called once, before the rest.
  __device__ __forceinline__ void begin(Storage<C>& storage, const Parameters& params, const Pass<C>& pass,
                                        int32_t warp, int32_t lane) {
    const uint32_t row = lane / kLanesPerRow, piece = lane % kLanesPerRow;
    typename Storage<C>::Stage(&ring)[C::kStages] = storage.ring[warp];
    place_ = smem_address(ring[0].codes[row]) + ((piece ^ stage_swizzle(row)) << 4);
    scale_place_ = smem_address(ring[0].scales[0]) + lane * kLaneScales;
    make_opaque(place_);
    make_opaque(scale_place_);
    if constexpr (C::kPowers) {
      // Of rows that a tile lacks: their scales have a say in which way a stage is multiplied.
#pragma unroll
      for (int stage = 0; stage < C::kStages; ++stage) reinterpret_cast<uint32_t*>(ring[stage].scales)[lane] = 0;
      __syncwarp();
    }
    const int32_t first = pass.tile_of(warp) * pass.tile_rows;
    const int32_t rows = min(pass.tile_rows, pass.rows - first);
    const int64_t first_row = pass.first_row + first;
    rows_from_here_ = rows - static_cast<int32_t>(row);
    codes_ = params.a + pass.batch * params.a_batch_bytes + (first_row + row) * params.a_row_bytes +
             chunk_ * C::kRowBytes + piece * 16;

    constexpr int kLanes = C::kRowScales / kLaneScales;  // that share a row
    scale_rows_ = rows - lane / kLanes;
    const uint8_t* batch_scales = params.sfa + pass.batch * params.sfa_batch_bytes;
    const int32_t column = chunk_ * C::kRowScales + lane % kLanes * kLaneScales;
    const auto place_of = [&](int64_t scale_row) {
      if (!params.swizzled) return batch_scales + (scale_row * params.sfa_row_bytes + column);
      return batch_scales + swizzled_scale(scale_row, column, (params.k + 4 * C::kBlock - 1) / (4 * C::kBlock));
    };
    const int64_t scale_row = first_row + lane / kLanes;
    scales_[0] = place_of(scale_row);
    if constexpr (kTwice) scales_[1] = place_of(scale_row + 8);
  }

  // The oldest stage: the one to multiply, and to copy to afterwards.
  __device__ __forceinline__ int32_t stage() const { return stage_; }

  // Issues the copies of this warp's next chunk into the oldest stage as one group, which is empty after the last one.
  __device__ __forceinline__ void copy() {
    issue();
    step();
  }

  // The first part of `copy`.
  __device__ __forceinline__ void issue() {
    if (chunk_ >= chunks_) rows_from_here_ = scale_rows_ = 0;
    const uint32_t stage = stage_ * static_cast<uint32_t>(sizeof(typename Storage<C>::Stage)), place = place_ + stage;
    const uint8_t* source = codes_;
#pragma unroll
    for (int i = 0; i < C::kTileRows; i += kRowsAtOnce) {
      const uint32_t flip = (i & kRowsAtOnce) ? kOddRowsFlip : 0u;
      stream_copy_if<16>(i < rows_from_here_, (place ^ flip) + i * C::kRowBytes, source, policy_);
      source += four_rows_;
    }
    // A line in L2 has the scales of the next chunks too, so it is not let go of first.
    const uint32_t scales = scale_place_ + stage;
    stream_copy_if<kLaneScales>(scale_rows_ > 0, scales, scales_[0]);
    if constexpr (kTwice) stream_copy_if<kLaneScales>(scale_rows_ > 8, scales + 8 * C::kRowScales, scales_[1]);
    stream_copy_commit();
  }

  // The second part, which is the same for all lanes.
  __device__ __forceinline__ void step() {
    codes_ += splits_ * C::kRowBytes;
    scales_[0] += scale_step_;
    if constexpr (kTwice) scales_[1] += scale_step_;
    chunk_ += splits_;
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
  }

 private:
  static constexpr int kLanesPerRow = C::kPieces;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static constexpr int kRowWords = C::kRowScales / 4;
  static constexpr int kLaneScales = kByRows ? C::kRowScales : 4;
  static constexpr bool kTwice = !kByRows && kRowWords == 4;  // of two rows that are eight apart
  static_assert(kRowsAtOnce == 4, "the swizzle of rows r and r + 4 differs in one bit");
  // By how much the place of a piece in rows 4-7 and 12-15 differs from that in rows 0-3, beside the row.
  static constexpr uint32_t kOddRowsFlip = (stage_swizzle(kRowsAtOnce) ^ stage_swizzle(0)) << 4;

  const uint64_t policy_;
  const int32_t chunks_, splits_, scale_step_;  // the last in bytes from chunk to chunk
  // In stage 0, of this lane's first piece and of its first scales.
  uint32_t place_, scale_place_;
  int64_t four_rows_;  // bytes
  int32_t stage_ = 0;
  int32_t chunk_;                  // that is copied next
  int32_t rows_from_here_;         // of the tile, from this lane's first row of codes on
  int32_t scale_rows_;             // from its row of scales on
  const uint8_t* codes_;           // this lane's first piece of the next chunk
  const uint8_t* scales_[kTwice ? 2 : 1];
};

}  // namespace cupymla::nvfp4_gemv
