// Where the rows of a cache lie, and what they consist of; mirrors `cupymla/ops/mla_cache/formats.py`.
//
// format     | a block of `page` slots
// -----------+---------------------------------------------------------------------------------------------------
// bf16       | rows of 576 or 512 bf16
// v32_fp8    | rows of 656 bytes: 512 e4m3, four fp32 scales, each of 128 channels, and 64 bf16
// v4_fp8     | rows of 576 bytes: 448 e4m3 and 64 bf16; behind all rows eight bytes of exponents for each, one of 64
//            | channels, the last one unused
//
// A row becomes tiles of 64 channels. A lane takes eight channels of a tile, eight bytes of codes or 16 of
// bf16; or sixteen codes of one.
#pragma once

#include "../../common/page_place.cuh"
#include "convert.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_decode {

// CUPYMLA_FORMAT
enum Format : int { kBf16 = 0, kV32Fp8 = 1, kV4Fp8 = 2 };

template <Format kFormatArg, int kDQk>
struct CacheFormat {
  static constexpr Format kFormat = kFormatArg;
  static constexpr int kTiles = kDQk / 64;
  static constexpr int kCodeTiles = kFormat == kV32Fp8 ? 8 : kFormat == kV4Fp8 ? 7 : 0;  // the first ones
  static constexpr int kRowBytes = kFormat == kV32Fp8 ? 656 : kFormat == kV4Fp8 ? 576 : kDQk * 2;
  static constexpr int kWideBegin = kFormat == kV32Fp8 ? 528 : kFormat == kV4Fp8 ? 448 : 0;  // where bf16 begin
  static constexpr int kScaleWords = kFormat == kV32Fp8 ? 4 : kFormat == kV4Fp8 ? 2 : 0;
  static constexpr int kWordTiles = kFormat == kV32Fp8 ? 2 : 4;  // whose scales are in one of these words
  static constexpr bool kPowersOfTwo = kFormat == kV4Fp8;
  static constexpr bool kHas16ByteRows = kFormat != kV4Fp8;  // else multiples of 8
  static_assert(kFormat == kBf16 || kCodeTiles + 1 == kTiles);
};

// Whether codes become elements by moved bits and a folded scale: convert.cuh.
template <typename Cache, typename Element>
__device__ __host__ constexpr bool folds() {
  return Cache::kCodeTiles > 0 && is_same_v<Element, __nv_bfloat16>;
}

// A selected row, as a lane knows it that looked for it.
struct Row {
  const uint8_t* data;  // of a row that is not valid, of any
  int64_t scales_at;    // of one that is valid, its scales, in bytes behind `data`
  bool valid;
};

template <typename Cache>
__device__ __forceinline__ Row find_row(const Source& source, int32_t slot, const uint8_t* any_row) {
  Row row;
  row.valid = static_cast<uint32_t>(slot) < source.slots;
  row.data = any_row;
  row.scales_at = 512;  // kV32Fp8
  if (!row.valid) return row;
  const auto [block, place] = PagePlace(static_cast<uint32_t>(slot), source.page, source.page_reciprocal);
  const uint8_t* begin = source.cache + static_cast<int64_t>(block) * source.block_bytes;
  row.data = begin + static_cast<int64_t>(place) * Cache::kRowBytes;
  // Behind the rows of a page, eight bytes of each.
  if constexpr (Cache::kFormat == kV4Fp8) {
    row.scales_at = static_cast<int64_t>(source.page - place) * Cache::kRowBytes + 8 * int64_t{place};
  }
  return row;
}

template <typename Cache>
struct Scales {
  uint32_t of[Cache::kScaleWords + 1];

  // Asked for here, not where they are used, which is where ptxas would put an ordinary load.
  // Zeros of a row that is not valid: nothing else times zero is sure to be zero. So of one that is not `wanted`.
  __device__ __forceinline__ void load(const Row& row, bool wanted) {
#pragma unroll
    for (uint32_t& word : of) word = 0;
    if (!row.valid || !wanted) return;
    if constexpr (Cache::kFormat == kV32Fp8) {
      load_row_16(of[0], of[1], of[2], of[3], row.data + row.scales_at);
    } else if constexpr (Cache::kFormat == kV4Fp8) {
      load_row_8(of[0], of[1], row.data + row.scales_at);
    }
  }

  // From those of a part's two tiles, in the first word, to those of the next one's.
  __device__ __forceinline__ void next_part() {
    if constexpr (Cache::kPowersOfTwo) {
      of[0] = __funnelshift_r(of[0], of[1], 16);
      of[1] >>= 16;
    } else {
#pragma unroll
      for (int i = 0; i < Cache::kScaleWords; ++i) of[i] = of[i + 1];
    }
  }

  // Those of the tiles that consumers convert, of a row of the block in a buffer: not folded.
  template <typename Storage>
  __device__ __forceinline__ void store_late(Storage& storage, int buffer, uint32_t row) const {
    if constexpr (Cache::kPowersOfTwo) {
      storage.scale_word(buffer, 0, row) = __uint_as_float(of[1]);
    } else if constexpr (Cache::kScaleWords > 0) {
      storage.scale_word(buffer, 0, row) = __uint_as_float(of[2]);
      storage.scale_word(buffer, 1, row) = __uint_as_float(of[3]);
    }
  }

  // Those of two of these tiles, the first of which has an even number, in the first word.
  template <typename Storage>
  __device__ __forceinline__ void load_late(Storage& storage, int buffer, uint32_t row, int number) {
#pragma unroll
    for (uint32_t& word : of) word = 0;
    if constexpr (Cache::kPowersOfTwo) {
      const bool has_second = Cache::kWordTiles + number + 1 < Cache::kCodeTiles;  // behind the last one is nothing
      of[0] = __float_as_uint(storage.scale_word(buffer, 0, row)) >> 8 * number & (has_second ? 0xffffu : 0xffu);
    } else {
      of[0] = __float_as_uint(storage.scale_word(buffer, number / Cache::kWordTiles, row));
    }
  }

  // fp32 into what `FoldedScale` takes. Returns whether all scales can be folded.
  __device__ __forceinline__ bool fold() {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < Cache::kScaleWords; ++i) {
      if constexpr (Cache::kPowersOfTwo) {
        fits = fits && FoldedPower::fit(i == 0 ? of[i] : of[i] & 0xffffffu);
      } else {
        fits = fits && FoldedScale::fits(__uint_as_float(of[i]));
        of[i] = FoldedScale::of(__uint_as_float(of[i]));
      }
    }
    return fits;
  }
};

}  // namespace cupymla::sparse_mla_decode
