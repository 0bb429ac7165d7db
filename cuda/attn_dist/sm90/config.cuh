// Numbers of the sm_90a attention distribution kernel, and the budgets they must keep.
#pragma once

#include "../../common/types.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::attn_dist {

// kHeadsArg: 128, or 64 where no query has more heads. A consumer needs 144 registers for Q and 32 for scores.
template <int kDQkArg, int kHeadsArg, typename Warpgroups = sm90::Warpgroups<2, 40, 232>>
struct Config : Warpgroups {
  using Warpgroups::kConsumers;

  static constexpr int kDQk = kDQkArg;                  // channels of a query and of a key
  static constexpr int kHeads = kHeadsArg;              // query heads of a head block
  static constexpr int kTileKeys = 64;                  // entries per KV block
  static constexpr int kBuffers = 3;                    // blocks in shared memory
  static constexpr int kTileColumns = 64;               // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);

  // A block arrives, is multiplied and is freed in one piece: each wait and each proxy fence costs a warp about 50
  // cycles, and nothing is gained by products that start before the last columns are in.
  static constexpr int kParts = 1;
  static __host__ __device__ constexpr int part_begin(int part) { return part * kKeyTiles; }
  static constexpr int kValidityPart = 0;  // part that the validity words come with
  // The last tile of a group of products, which can be waited for.
  static __host__ __device__ constexpr bool ends_group(int tile) { return tile == kKeyTiles - 1; }

  static constexpr int kConsumerHeads = 64;                        // one wgmma M
  static constexpr int kQueryBlocks = kHeads / kConsumerHeads;     // blocks of shared memory that Q goes through
  // Two consumers split 128 heads between them; with the same 64 heads each takes every second block of a row.
  static constexpr bool kAlternate = kHeads == 64;
  // With 128 heads products bind, so consumers issue theirs in turn. The other's turn begins behind this tile of a
  // block: what it needs to hear of that and to begin, the products of the tiles left take.
  static constexpr int kOrderTile = kKeyTiles - 2;
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr int kSumGroups = kAlternate ? kConsumers : 1;  // of warps that sum over the same entries' heads
  static constexpr int kPartialSums = kWarps / kSumGroups;        // addends of an entry's sum over heads

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == 64 || kHeads == 128);
  static_assert(kTileKeys == kConsumerHeads, "Q goes through buffers of KV blocks");
};

}  // namespace cupymla::attn_dist
