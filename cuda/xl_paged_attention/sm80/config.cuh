// Numbers of the paged attention kernel, and the budgets they must keep.
#pragma once


#include "../../common/fp8_fp4.cuh"

namespace cupymla::xl_paged_attention {

// What an SM of the target has (CUDA C++ Programming Guide, "Compute Capabilities"). CUPYMLA_SMEM_PER_SM: bytes, where
// the GPU has less than the target, as compute capability 8.6 has less than sm_80.
#if defined(CUPYMLA_SMEM_PER_SM)
constexpr int kSmemPerSm = CUPYMLA_SMEM_PER_SM;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
constexpr int kSmemPerSm = 100 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSmemPerSm = 164 * 1024;
#else
constexpr int kSmemPerSm = 228 * 1024;
#endif

// Two rings of the largest 16-bit heads are all that the smallest shared memory holds.
constexpr bool kFewRings = kSmemPerSm == 100 * 1024 && CUPYMLA_HEAD_SIZE > 128 && CUPYMLA_CACHE == 0;
constexpr int kWarps = kFewRings ? 2 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kSmemPerCta = 1024;  // that every CTA costs beside its own

constexpr int kMergeFloats = 2048;  // of the exchange area in which warps, and then CTAs, put their results together

template <typename Cache>
constexpr bool kIsFp8 = sizeof(Cache) == 1;

// Stages of a warp's ring: the fewest with which an SM has kOnTheirWay bytes asked for while all of its warps are at
// work, as far as shared memory goes. With more than that, SMs queue for the memory, and some of them get a fifth less
// of it than others.
constexpr int kOnTheirWay = 48 * 1024;

__host__ __device__ constexpr int ring_stages(int ctas, int fixed_bytes, int stage_bytes) {
  const int fitting = (kSmemPerSm / ctas - kSmemPerCta - fixed_bytes) / (kWarps * stage_bytes);
  const int wanted = 1 + (kOnTheirWay + ctas * kWarps * stage_bytes - 1) / (ctas * kWarps * stage_bytes);
  const int most = fitting < 4 ? fitting : 4;
  return wanted < most ? wanted : most;
}

__host__ __device__ constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
__host__ __device__ constexpr int divide_up(int value, int unit) { return (value + unit - 1) / unit; }

// The tensor-core engine: tiles of keys in shared memory, a ring of them for each warp.
//
// kPages: a "vllm" cache whose block size is a multiple of 16; otherwise rows of head_size contiguous elements.
template <int kHeadSizeArg, typename QueryArg, typename CacheArg, bool kPagesArg>
struct TensorConfig {
  using Query = QueryArg;
  using Cache = CacheArg;
  static constexpr bool kPages = kPagesArg;
  static constexpr int kHeadSize = kHeadSizeArg;
  static constexpr bool kFp8 = kIsFp8<Cache>;
  // What the products take. fp8 becomes fp16 in one instruction and bf16 in four, so a bf16 query becomes fp16 as well:
  // see `scale_query` in tensor.cuh.
  using Operand = conditional_t<kFp8, __half, Query>;
  static constexpr bool kScaledQuery = kFp8 && !is_same_v<Query, __half>;
  // Weights go into products with the values times this, since those below 2^-25 are nothing in fp16.
  static constexpr float kWeightScale = kFp8 ? 32768.0f : 1.0f;
  static constexpr int kItem = sizeof(Cache);
  static constexpr int kRows = 16;  // query heads of a unit: one mma M
  static constexpr int kSub = 16;   // tokens of a step along the values: one mma K

  // As many tokens as make a stage of a warp about 8 KB; fewer for fp8 rows of large heads, which are short of
  // registers.
  static constexpr bool kShortTile = 2 * 32 * kHeadSize * kItem > 8192 || (kFp8 && !kPages && kHeadSize > 64);
  static constexpr int kTile = kShortTile ? 16 : 32;
  static constexpr int kSubs = kTile / kSub;

  static constexpr int kChannelSteps = divide_up(kHeadSize, 16);  // mma K steps along the channels
  static constexpr int kPadded = 16 * kChannelSteps;
  static constexpr int kChunk = 16 / kItem;                       // elements of a 16-byte chunk
  static constexpr int kRowChunks = divide_up(kHeadSize, kChunk);
  static constexpr int kPaddedChunks = divide_up(kPadded, kChunk);

  // Rows: an odd number of chunks from row to row, so that eight rows of a matrix fall into eight different banks.
  static constexpr int kPitch = 16 * (kPaddedChunks | 1);
  // Values by fp8 rows come in pairs of channels: see `tensor.cuh`.
  static constexpr bool kPairedColumns = kFp8 && !kPages;
  static constexpr int kColumnTiles = kPairedColumns ? 2 * kChannelSteps : kHeadSize / 8;
  static constexpr int kColumnTilesPadded = round_up(kColumnTiles, kFp8 && kPages ? 4 : 2);

  static constexpr int kKeyBytes = kPages ? round_up(kPaddedChunks, 2) * kTile * 16 : kTile * kPitch;
  static constexpr int kValueSubBytes = 8 * kColumnTilesPadded * kSub * kItem;  // of a page's 16 tokens
  static constexpr int kValueBytes = kPages ? kSubs * kValueSubBytes : kTile * kPitch;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;

  // Rows of the query in shared memory, with the same rule for banks.
  static constexpr int kQueryPitch = 2 * kPadded + 16;
  static constexpr bool kQueryInRegisters = kHeadSize <= 128;
  static constexpr bool kAskEarly = !kFp8 && kPages && kHeadSize <= 128;  // a thread holds its part of Q, as it comes
  static constexpr int kMergeBatch =  // as registers allow
      kHeadSize > 128 || kFp8 ? 4 : !kPages || kPadded != kHeadSize ? 6 : 12;

  static constexpr int kFixedBytes = kMergeFloats * 4 + kRows * kQueryPitch + 2048;
  static constexpr int kCtasPerSm = ring_stages(2, kFixedBytes, kStageBytes) >= 2 ? 2 : 1;
  static constexpr int kStages = ring_stages(kCtasPerSm, kFixedBytes, kStageBytes);
  static_assert(kStages >= 2, "a tile must be on its way while another is worked on");
  static_assert(kTile <= 32, "one bit for each token of a tile");
};

// The plain engine: fp32 arithmetic on what it loads, any cache. Used for fp32 queries and for block sizes that no
// copy of 16 bytes can follow.
template <int kHeadSizeArg, typename QueryArg, typename CacheArg>
struct PlainConfig {
  using Query = QueryArg;
  using Cache = CacheArg;
  static constexpr int kHeadSize = kHeadSizeArg;
  static constexpr int kItem = sizeof(Cache);
  static constexpr int kRows = 4;
  static constexpr int kTile = 32;
  static constexpr int kVector = 8 / kItem;  // elements of an 8-byte load
  static constexpr int kLaneChannels = divide_up(kHeadSize, 32);
  static constexpr int kTokensAtOnce = kHeadSize > 128 ? 1 : 3;  // whose values a lane loads together; more would spill
  static constexpr int kStages = 1;
  static constexpr int kStageBytes = 0;
  static constexpr int kQueryPitch = 4 * kHeadSize;
  static constexpr int kMergeBatch = 4;
  static constexpr int kCtasPerSm = 3;
};

}  // namespace cupymla::xl_paged_attention
