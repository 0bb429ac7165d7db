// Numbers of the sm_90a sparse MLA forward kernel, and the budgets they must keep.
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/types.cuh"
#include "../../common/registers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_fwd {

template <int kDQkArg, int kHeadsArg, bool kSplitArg>
struct Sizes {
  static constexpr bool kSplit = kSplitArg;      // whether the CTAs of a cluster share the entries of a query
  static constexpr int kMaxCluster = kSplit ? 16 : 1;
  static constexpr bool kSkipsFresh = false;     // whether output that is zero yet is not multiplied
  static constexpr uint32_t kSharers = 1;        // CTAs that bring in the rows of a block for each other
  using FreeBarrier = Mbarrier;                  // through which a consumer frees a key buffer
  static constexpr int kDQk = kDQkArg;           // channels of a key
  static constexpr int kDV = 512;                // channels of a value: the first ones of the key
  static constexpr int kHeads = kHeadsArg;       // query heads per CTA
  static constexpr int kTileKeys = 64;           // keys of a tile: top-k entries of a KV block
  static constexpr int kTileColumns = 64;        // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);  // of Q and P

  // A KV block arrives in parts, so that the first products start before its last rows are in.
  static constexpr int kParts = 4;
  static __host__ __device__ constexpr int part_begin(int part) { return part == kParts ? kKeyTiles : 2 * part; }

  static constexpr int kWarpgroup = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 72;

  static_assert(kDQk == 576 || kDQk == 512);
};

// As many heads as a wgmma has rows. Both consumers do the same.
template <int kDQk>
struct ManyHeads : Sizes<kDQk, 64, false> {
  using Base = Sizes<kDQk, 64, false>;
  static constexpr bool kSmallHead = false;
  static constexpr int kBuffers = 2;                        // KV blocks in shared memory; block i lives in buffer i % 2
  static constexpr bool kConsumersConvert = false;          // whether a consumer makes part of its own blocks
  static constexpr int kHalfTiles = Base::kValueTiles / 2;  // column tiles of the output that one consumer owns
  static constexpr int kLeftParts = 2;                      // parts that hold the left half of the value columns
  static constexpr int kConsumerRegisters[] = {216, 216};
  static constexpr int kWarpgroupRegisters =
      Base::kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];

  static_assert(Base::kHeads == Base::kTileKeys, "query, key and probability tiles share one size");
  static_assert(Base::part_begin(kLeftParts) == kHalfTiles, "parts must not straddle the halves that are freed");
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

// At most half as many heads as a wgmma has rows. Scores are padded to those rows, with Q in registers, which leaves
// shared memory to three KV blocks; of the output, whose products read more of it, heads are the columns.
template <int kDQk, int kHeads, bool kSplit>
struct SmallHead : Sizes<kDQk, kHeads, kSplit> {
  using Base = Sizes<kDQk, kHeads, kSplit>;
  static constexpr bool kSmallHead = true;
  static constexpr int kBuffers = 3;    // KV blocks, and before a query's first block its Q
  static constexpr int kHandovers = 2;  // places for P
  // Parts of a block whose scores are issued before the softmax of the block before it. With more of them tensor cores
  // have more to do meanwhile, but P of a block waits for the arrival of as much of the next.
  static constexpr int kEarlyParts = 2;
  static constexpr int kWarpHeads = 8;  // rows of a warp that are heads, of sixteen
  static constexpr int kHeadWarps = kHeads / kWarpHeads;
  static constexpr int kConsumerRegisters[] = {240, 192};  // scores, values
  static constexpr int kWarpgroupRegisters =
      Base::kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];

  static_assert(kHeads == 16 || kHeads == 32);
  static_assert(kEarlyParts > 0 && kEarlyParts < Base::kParts);
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

}  // namespace cupymla::sparse_mla_fwd
