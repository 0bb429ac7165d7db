// Numbers of the sm_90a attention distribution kernel, and the budgets they must keep.
#pragma once

#include "../../common/integers.cuh"
#include "../../common/registers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::attn_dist {

// kHeadsArg: 128, or 64 where no query has more heads.
template <int kDQkArg, int kHeadsArg>
struct Config {
  static constexpr int kDQk = kDQkArg;                  // channels of a query and of a key
  static constexpr int kHeads = kHeadsArg;              // query heads of one pass over a query's KV rows
  static constexpr int kSlots = 64;                     // slots per KV block
  static constexpr int kBuffers = 3;                    // blocks in shared memory
  static constexpr int kTileColumns = 64;               // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);

  // A block arrives in parts, so that the first products start before its last columns are in, and is freed in halves.
  static constexpr int kParts = 4;
  static __host__ __device__ constexpr int part_begin(int part) { return part == kParts ? kKeyTiles : 2 * part; }
  static constexpr int kLeftParts = 2;      // parts of the half that is freed first
  static constexpr int kValidityPart = 0;   // part that the validity words come with

  static constexpr int kConsumers = 2;
  static constexpr int kConsumerHeads = 64;                        // one wgmma M
  static constexpr int kQueryBlocks = kHeads / kConsumerHeads;     // blocks of shared memory that Q passes through
  // Two consumers split 128 heads between them, or the slots of a block when they have the same 64 heads.
  static constexpr int kColumns = kSlots * kQueryBlocks / kConsumers;
  // With 128 heads products bind, so consumers issue theirs in turn; with fewer the gather does.
  static constexpr bool kInOrder = kHeads == 128;
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr int kPartialSums = kWarps * kColumns / kSlots;  // addends of a slot's sum over heads

  static constexpr int kWarpgroup = 128;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  // 144 for Q and 64 for scores leave a consumer too little of 232; elsewhere the producer can have more.
  static constexpr bool kTight = kDQk == 576 && kHeads == 128;
  static constexpr int kProducerRegisters = kTight ? 24 : 40;
  static constexpr int kConsumerRegisters = kTight ? 240 : 232;
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == 64 || kHeads == 128);
  static_assert(kSlots == kConsumerHeads, "Q passes through buffers of KV blocks");
  static_assert(kWarpgroupRegisters <= pool_registers(kThreads), "the pool that the CTA gets at launch");
};

}  // namespace cupymla::attn_dist
