// Numbers of the streaming kernel, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/fp8_fp4.cuh"

namespace cupymla::nvfp4_gemv {

enum class Vectors { e2m1, bfloat16, float16 };  // what b holds

// Where the scales of a are multiplied in.
enum class Scaling {
  codes,    // into the codes, as 16-bit floats, before the MMA: E8M0 scales want bfloat16 for that
  blocks,   // into the sums of blocks of 32, each with MMAs of its own: E8M0 scales beside halves
  columns,  // into the sums of blocks, which the MMA's eight columns keep apart: for one vector only
};

// kMxfp4Arg: MXFP4 instead of NVFP4. kVectorsArg: what b holds. kMostColumnsArg: 1, 8 or 16, the largest n.
template <bool kMxfp4Arg, Vectors kVectorsArg, int kMostColumnsArg>
struct Config {
  static constexpr bool kMxfp4 = kMxfp4Arg;
  static constexpr Vectors kVectors = kVectorsArg;
  static constexpr int kMostColumns = kMostColumnsArg;
  static constexpr int kColumnBlocks = (kMostColumns + 7) / 8;  // blocks of 8 columns: one MMA N each
  static constexpr int kBlock = kMxfp4 ? 32 : 16;  // elements of k per scale
  // E2M1 vectors with E8M0 scales stay halves, block by block, where an instruction converts codes to halves.
  static constexpr bool kHalves = kVectors == Vectors::float16 || (kVectors == Vectors::e2m1 && kFp4Conversions);
  static constexpr Scaling kScaling = kMostColumns == 1    ? Scaling::columns
                                      : kMxfp4 && kHalves ? Scaling::blocks
                                                           : Scaling::codes;
  // Whether E8M0 scales are multiplied into codes, of a and of b, which are bfloat16 then.
  static constexpr bool kPowers = kMxfp4 && kScaling == Scaling::codes;
  // Whether codes of a and of b become bytes that integer MMAs multiply.
  static constexpr bool kIntegers =
      kVectors == Vectors::e2m1 && kScaling == Scaling::columns && !kFp4Conversions;
  // Whether factors of the blocks of b are kept beside its elements, to be multiplied with the scales of a.
  static constexpr bool kVectorScales = kScaling == Scaling::columns  ? kVectors != Vectors::float16
                                        : kScaling == Scaling::blocks ? kVectors == Vectors::e2m1
                                                                      : false;

  static constexpr int kTileRows = 16;      // rows of a per warp: one MMA M
  static constexpr int kChunk = 256;        // elements of k per stage
  static constexpr int kRowBytes = kChunk / 2;
  static constexpr int kRowScales = kChunk / kBlock;
  static constexpr int kPieces = kRowBytes / 16;  // 16-byte pieces of a row in a stage
  static constexpr int kVectorChunkBytes = kChunk * (kIntegers ? 1 : 2);  // of a column of b, decoded

  // Two stages, with which an SM has what the memory's latency asks for on its way, and little more, are the fastest on
  // sm_90. Elsewhere, unmeasured, more where there are few columns: b leaves the room, and multiplying takes as long as
  // reading.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kStages = kMostColumns == 1 ? 3 : 2;
  static constexpr int kWarps = 8;
  static constexpr int kSharedBytes = 99 * 1024;  // what compute capability 8.6 and 8.9 have
#else
  // Where codes are converted by an instruction ptxas 12.9 spills with two stages and the most columns.
  static constexpr int kStages = !kFp4Conversions ? 2 : kMostColumns == 1 ? 4 : 3;
  static constexpr int kWarps = 16;
  static constexpr int kSharedBytes = 227 * 1024;
#endif
  static constexpr int kWarpsLog2 = kWarps == 16 ? 4 : 3;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPassRows = kWarps * kTileRows;  // rows that all warps hold sums of at a time

  static_assert(kPieces == 8, "the swizzle spreads eight pieces over all banks");
  static_assert(kMostColumns == 1 || kMostColumns == 8 || kMostColumns == 16);
  static_assert(kScaling != Scaling::columns || kPieces == 8, "a column of the MMA for each piece");
};

}  // namespace cupymla::nvfp4_gemv
