// Numbers of the sm_100f attention distribution kernel, and the budgets they must keep.
#pragma once

#include "../../common/sm100/topk_gather.cuh"
#include "../../common/sm100/tmem.cuh"

namespace cupymla::attn_dist {

// kHeadsArg: 128, or 64 where no query has more heads.
template <int kDQkArg, int kHeadsArg>
struct Config {
  static constexpr int kDQk = kDQkArg;                // channels of a query and of a key
  static constexpr int kHeads = kHeadsArg;            // query heads of a head block
  static constexpr int kCtaHeads = 64;                // of which a CTA holds in shared memory
  static constexpr int kCtas = kHeads / kCtaHeads;    // that multiply together
  static constexpr int kCtaKeys = 128;                // entries of a block that a CTA gathers and sums up
  static constexpr int kTileKeys = kCtas * kCtaKeys;  // entries of a block
  static constexpr int kTileColumns = sm100::kTileColumns;
  static constexpr int kTiles = kDQk / kTileColumns;
  static constexpr int kKeyTileBytes = kCtaKeys * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kHeadTileBytes = kCtaHeads * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kStages = 9;        // key tiles in shared memory
  static constexpr int kAccumulators = 4;  // blocks in Tensor Memory
  static constexpr int kHeadBlocks = 4;    // that the planner may be ahead

  // Heads are multiplied and read from Tensor Memory so many at a time.
  static constexpr int kHeadStep = 32;

  // Warps. The epilogue's come first, a multiple of four, as Tensor Memory asks.
  static constexpr int kEpilogueWarps = 4;
  static constexpr int kProducerWarps = 4;
  static constexpr int kPlanner = kEpilogueWarps + kProducerWarps;
  static constexpr int kMultiplier = kPlanner + 1;
  static constexpr int kThreads = 32 * (kMultiplier + 1);
  static constexpr int kWarpKeys = kCtaKeys / kProducerWarps;    // entries of a block that a producer warp gathers

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == 64 || kHeads == 128);
  static_assert(kWarpKeys == 32 && kEpilogueWarps * 32 == kCtaKeys, "a lane looks after one entry");
  static_assert(kAccumulators * kHeads <= static_cast<int>(sm100::kTmemColumns), "Tensor Memory");
};

// Tensor Memory: accumulator a is columns a kHeads to (a + 1) kHeads. Lane l of a CTA is its entry l of the block,
// column h head h of the head block.
template <typename Config>
constexpr uint32_t kTmemColumns = Config::kAccumulators * Config::kHeads;

}  // namespace cupymla::attn_dist
