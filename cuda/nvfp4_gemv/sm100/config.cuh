// Numbers of the tcgen05 kernel, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

// kMxfp4Arg: MXFP4 instead of NVFP4. kColumnsArg: 8 or 16, what n is padded to.
template <bool kMxfp4Arg, int kColumnsArg>
struct Config {
  static constexpr bool kMxfp4 = kMxfp4Arg;
  static constexpr uint32_t kColumns = kColumnsArg;     // N of a product; 8 is the least there is
  static constexpr uint32_t kBlock = kMxfp4 ? 32 : 16;  // elements of k per scale

  static constexpr uint32_t kTileRows = 128;  // M of a product; block-scaled kinds have no other
  static constexpr uint32_t kChunk = 256;     // elements of k per stage: a swizzled row of 128 bytes
  static constexpr uint32_t kRowBytes = kChunk / 2;
  static constexpr uint32_t kProducts = kChunk / 64;
  // 128 rows x 4 scales are a block of 512 bytes in the 128x4 layout, 32 rows of 16 bytes.
  static constexpr uint32_t kScaleBlocks = kChunk / kBlock / 4;
  static constexpr uint32_t kScaleBlockBytes = 512;
  // Of a block of b's scales only the rows of columns are brought in, 16 bytes for each.
  static constexpr uint32_t kVectorBlockBytes = kColumns * 16;
  static constexpr uint32_t kStages = 5;

  static constexpr uint32_t kCheckWarps = 4;  // warps 0-3: scales, and later the sums of their quarter of the lanes
  static constexpr uint32_t kLoadWarp = 4, kMultiplyWarp = 5;
  static constexpr uint32_t kThreads = 32 * 6;

  // Tensor Memory: sums first, then the scales of each stage.
  static constexpr uint32_t kAccumulators = 4;  // take turns, so that chains of additions are a quarter as long
  static constexpr uint32_t kSumColumns = kAccumulators * kColumns;
  static constexpr uint32_t kScaleColumns = 4 * kScaleBlocks;  // of a and again of b, per stage
  static constexpr uint32_t kTmemUsed = kSumColumns + kStages * 2 * kScaleColumns;
  static constexpr uint32_t kTmemColumns = kTmemUsed <= 128 ? 128 : 256;

  static constexpr uint32_t kStageBytes =
      (kTileRows + kColumns) * kRowBytes + kScaleBlocks * (kScaleBlockBytes + kVectorBlockBytes);

  static_assert(kColumns == 8 || kColumns == 16);
  static_assert(kTmemUsed <= kTmemColumns && 2 * kTmemColumns <= 512, "two CTAs share a multiprocessor");
};

}  // namespace cupymla::nvfp4_gemv
