// Brings a and its scales in: every warp copies the stages of its own tiles, far ahead of their use.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/async_copy.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

template <class C>
class Stream {
 public:
  // `first` is the pass that `passes` are at.
  __device__ __forceinline__ Stream(Storage<C>& storage, const Parameters& params, const Passes<C>& passes,
                                    const Pass<C>& first, int32_t warp, int32_t lane)
      : ring_(storage.ring[warp]), params_(params), passes_(passes), warp_(warp), lane_(lane),
        policy_(l2_policy_evict_first()), chunks_(chunks_of(params, C::kChunk)),
        whole_chunks_(params.a_aligned && params.sfa_access != kScalesByBytes
                          ? static_cast<int32_t>(static_cast<uint64_t>(params.k) / C::kChunk)
                          : 0) {
    const uint32_t row = lane / kLanesPerRow, piece = lane % kLanesPerRow;
    place_ = smem_address(ring_[0].codes[row]) + ((piece ^ stage_swizzle(row)) << 4);
    scale_place_ = smem_address(ring_[0].scales[0]) + lane * C::kRowScales;
    word_place_ = smem_address(ring_[0].scales[lane / kRowWords]) + lane % kRowWords * 4;
    four_rows_ = kRowsAtOnce * params.a_row_bytes;
    make_opaque(place_);
    make_opaque(scale_place_);
    make_opaque(word_place_);
    make_opaque(four_rows_);
    make_opaque(whole_chunks_);
    if constexpr (C::kPowers) {
      // Of rows that a tile lacks: their scales have a say in which way a stage is multiplied.
#pragma unroll
      for (int stage = 0; stage < C::kStages; ++stage) reinterpret_cast<uint32_t*>(ring_[stage].scales)[lane] = 0;
      __syncwarp();
    }
    if (!open(first)) open_next();
  }

  // The oldest stage: the one to multiply, and to copy to afterwards.
  __device__ __forceinline__ int32_t stage() const { return stage_; }

  // Issues the copies of this warp's next chunk into the oldest stage as one group, which is empty after the last one.
  __device__ __forceinline__ void copy_next() {
    if (chunk_ < chunks_) {
      if (chunk_ < whole_chunks_) {
        copy_whole();
      } else {
        copy_codes();
        copy_scales();
      }
      step();
      if (chunk_ >= chunks_) open_next();
    }
    close();
  }

  // Whether `copy_plain` may take the place of the next `copy_next`: for almost all chunks, and when none is left.
  __device__ __forceinline__ bool plain() const { return chunk_ < plain_end_ || chunk_ >= chunks_; }

  // `copy_next` for whole chunks after which no pass is opened. It is small and has no branch: the loop around it is
  // read from the instruction cache in a row.
  __device__ __forceinline__ void copy_plain() {
    if (chunk_ >= chunks_) rows_from_here_ = rows_of_lane_ = word_rows_ = 0;
    copy_whole();
    step();
    close();
  }

 private:
  using Stage = typename Storage<C>::Stage;

  static constexpr int kLanesPerRow = C::kPieces;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;
  static constexpr int kRowWords = C::kRowScales / 4;
  static_assert(kRowsAtOnce == 4, "the swizzle of rows r and r + 4 differs in one bit");

  // Of a whole chunk, and scales that may be copied in words or rows.
  __device__ __forceinline__ void copy_whole() {
    copy_whole_codes();
    copy_whole_scales();
  }

  __device__ __forceinline__ void step() {
    chunk_ += splits_;
    codes_ += code_step_;
    scales_[0] += scale_step_;
    scales_[1] += scale_step_;
  }

  __device__ __forceinline__ void close() {
    stage_ = stage_ + 1 == C::kStages ? 0 : stage_ + 1;
    stream_copy_commit();
  }

  // The next pass in which this warp has anything to copy; past the last one no chunk is left.
  __device__ __forceinline__ void open_next() {
    do {
      passes_.next();
    } while (!passes_.done() && !open(passes_.get()));
  }

  // Whether this warp has anything to copy in a pass; if so, from the first chunk on.
  __device__ __forceinline__ bool open(const Pass<C>& pass) {
    const int32_t tile = pass.tile_of(warp_);
    rows_ = min(pass.tile_rows, pass.rows - tile * pass.tile_rows);
    chunk_ = pass.split_of(warp_);
    if (rows_ <= 0 || chunk_ >= chunks_) {
      chunk_ = chunks_;
      return false;
    }
    rows_from_here_ = rows_ - lane_ / kLanesPerRow;
    const int64_t first_row = pass.first_row + tile * pass.tile_rows;
    splits_ = pass.splits;
    plain_end_ = passes_.last() ? whole_chunks_ : min(whole_chunks_, chunks_ - splits_);
    code_step_ = splits_ * C::kRowBytes;
    scale_step_ = splits_ * (params_.swizzled ? kRowWords * 512 : C::kRowScales);
    codes_ = params_.a + pass.batch * params_.a_batch_bytes +
             (first_row + lane_ / kLanesPerRow) * params_.a_row_bytes + chunk_ * C::kRowBytes +
             lane_ % kLanesPerRow * 16;
    const uint8_t* batch_scales = params_.sfa + pass.batch * params_.sfa_batch_bytes;
    const bool by_rows = params_.sfa_access == kScalesByRows;
    rows_of_lane_ = by_rows ? rows_ - lane_ : 0;
    word_rows_ = by_rows ? 0 : rows_ - lane_ / kRowWords;
    const int64_t row = first_row + (by_rows ? lane_ : lane_ / kRowWords);
    const int64_t column = static_cast<int64_t>(chunk_) * C::kRowScales + (by_rows ? 0 : lane_ % kRowWords * 4);
    scales_[0] = batch_scales + scale_offset(row, column);
    if (kRowWords == 4 && !by_rows) scales_[1] = batch_scales + scale_offset(row + 8, column);
    return true;
  }

  // Of a whole chunk whose rows may be copied in 16-byte pieces: almost all of them.
  __device__ __forceinline__ void copy_whole_codes() {
    const uint32_t place = place_ + stage_ * static_cast<uint32_t>(sizeof(Stage));
    const uint8_t* source = codes_;
#pragma unroll
    for (int i = 0; i < C::kTileRows; i += kRowsAtOnce) {
      const uint32_t flip = (i & kRowsAtOnce) ? kOddRowsFlip : 0u;
      stream_copy_if<16>(i < rows_from_here_, (place ^ flip) + i * C::kRowBytes, source, policy_);
      source += four_rows_;
    }
  }

  // A row per lane, or four scales per lane, twice with NVFP4: without a branch, as above. A line in L2 has the scales
  // of the next chunks too, so it is not let go of first.
  __device__ __forceinline__ void copy_whole_scales() {
    const uint32_t stage = stage_ * static_cast<uint32_t>(sizeof(Stage));
    stream_copy_if<C::kRowScales>(rows_of_lane_ > 0, scale_place_ + stage, scales_[0]);
    const uint32_t words = word_place_ + stage;
    stream_copy_if<4>(word_rows_ > 0, words, scales_[0]);
    if constexpr (kRowWords == 4) stream_copy_if<4>(word_rows_ > 8, words + 8 * C::kRowScales, scales_[1]);
  }

  // The codes at any alignment and at the end of k, where zeros follow.
  __device__ __forceinline__ void copy_codes() {
    const int32_t row = lane_ / kLanesPerRow, piece = lane_ % kLanesPerRow;
    const int64_t left = params_.k / 2 - static_cast<int64_t>(chunk_) * C::kRowBytes - piece * 16;
    const uint32_t bytes = left >= 16 ? 16u : left > 0 ? static_cast<uint32_t>(left) : 0u;
#pragma unroll 1
    for (int i = row; i < rows_; i += kRowsAtOnce) {
      uint8_t* target = ring_[stage_].codes[i] + ((piece ^ stage_swizzle(i)) << 4);
      // An address past the end of a row is not formed.
      const uint8_t* source = bytes == 0 ? params_.a : codes_ + (i - row) * params_.a_row_bytes;
      // Not with fewer bytes: they are read by themselves, but compute-sanitizer takes all 16 for read.
      if (params_.a_aligned && bytes % 16 == 0) {
        stream_copy_or_zeros<16>(smem_address(target), source, bytes, policy_);
      } else {
#pragma unroll 1
        for (uint32_t byte = 0; byte < 16; ++byte) target[byte] = byte < bytes ? source[byte] : 0;
      }
    }
  }

  __device__ __forceinline__ void copy_scales() {
    const int64_t columns = (params_.k + C::kBlock - 1) / C::kBlock;
    const int64_t first = static_cast<int64_t>(chunk_) * C::kRowScales;
    const Pass<C> pass = passes_.get();
    const int64_t first_row = pass.first_row + pass.tile_of(warp_) * pass.tile_rows;
    const uint8_t* batch_scales = params_.sfa + pass.batch * params_.sfa_batch_bytes;
#pragma unroll 1
    for (int i = lane_; i < rows_ * kRowWords; i += 32) {
      const int32_t row = i / kRowWords, word = i % kRowWords;
      copy_scale_word(ring_[stage_].scales[row] + word * 4, batch_scales, first_row + row, first + word * 4, columns);
    }
  }

  __device__ __forceinline__ int64_t scale_offset(int64_t row, int64_t column) const {
    if (!params_.swizzled) return row * params_.sfa_row_bytes + column;
    return swizzled_scale(row, column, (params_.k + 4 * C::kBlock - 1) / (4 * C::kBlock));
  }

  // Four scales of a row; zeros past its end, so that padding never counts.
  __device__ __forceinline__ void copy_scale_word(uint8_t* target, const uint8_t* batch_scales, int64_t row,
                                                  int64_t column, int64_t columns) {
    const int64_t left = columns - column;
    const uint32_t bytes = left >= 4 ? 4u : left > 0 ? static_cast<uint32_t>(left) : 0u;
    const uint8_t* source = params_.sfa;
    if (bytes != 0) source = batch_scales + scale_offset(row, column);
    if (params_.sfa_access != kScalesByBytes && bytes % 4 == 0) {
      stream_copy_or_zeros<4>(smem_address(target), source, bytes);
    } else {
#pragma unroll 1
      for (uint32_t byte = 0; byte < 4; ++byte) target[byte] = byte < bytes ? source[byte] : 0;
    }
  }

  // By how much the place of a piece in rows 4-7 and 12-15 differs from that in rows 0-3, beside the row.
  static constexpr uint32_t kOddRowsFlip = (stage_swizzle(kRowsAtOnce) ^ stage_swizzle(0)) << 4;

  Stage (&ring_)[C::kStages];
  const Parameters& params_;
  Passes<C> passes_;
  const int32_t warp_, lane_;
  const uint64_t policy_;
  const int32_t chunks_;
  // Those that k does not end in, if rows may be copied in 16-byte pieces and their scales in words or rows.
  int32_t whole_chunks_;
  // In stage 0, of this lane's first piece and of its scales, by rows and by words.
  uint32_t place_, scale_place_, word_place_;
  int64_t four_rows_;             // bytes
  int32_t stage_ = 0;
  int32_t chunk_ = 0, splits_ = 1;  // chunk_ is past chunks_ where no pass has one left
  int32_t plain_end_ = 0;           // chunks before it may be copied by `copy_plain`
  uint32_t code_step_ = 0, scale_step_ = 0;  // bytes from chunk to chunk
  int32_t rows_ = 0;                         // of the tile
  int32_t rows_from_here_ = 0;               // from this lane's first row of codes on
  // From its row of scales on, by rows and by words: of the two ways the one that is not taken has none.
  int32_t rows_of_lane_ = 0, word_rows_ = 0;
  const uint8_t* codes_ = nullptr;   // this lane's first piece of the next chunk
  // This lane's first scales of the next chunk: of row `lane`, or by words of two rows that are eight apart.
  const uint8_t* scales_[2] = {};
};

}  // namespace cupymla::nvfp4_gemv
