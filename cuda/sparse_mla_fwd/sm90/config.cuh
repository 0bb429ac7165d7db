// Numbers of the sm_90a sparse MLA forward kernel, and the budgets they must keep.
#pragma once

#include "../../common/integers.cuh"
#include "../../common/registers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_fwd {

template <int kDQkArg, int kHeadsArg, bool kSplitArg>
struct Sizes {
  static constexpr bool kSplit = kSplitArg;      // whether the CTAs of a cluster share the slots of a query
  static constexpr int kMaxCluster = kSplit ? 16 : 1;
  static constexpr int kDQk = kDQkArg;           // channels of a key
  static constexpr int kDV = 512;                // channels of a value: the first ones of the key
  static constexpr int kHeads = kHeadsArg;       // query heads per CTA
  static constexpr int kSlots = 64;              // slots per KV block
  static constexpr int kTileColumns = 64;        // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);  // of Q and P

  // A KV block arrives in parts, so that the first products start before its last rows are in.
  static constexpr int kParts = 4;
  static __host__ __device__ constexpr int part_begin(int part) { return part == kParts ? kKeyTiles : 2 * part; }

  static constexpr int kWarpgroup = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kWarpgroupRegisters <= pool_registers(kThreads), "the pool that the CTA gets at launch");
};

// Heads are the rows of the products: one wgmma M.
template <int kDQk, bool kSplit>
struct ManyHeads : Sizes<kDQk, 64, kSplit> {
  using Base = Sizes<kDQk, 64, kSplit>;
  static constexpr bool kTransposed = false;
  static constexpr int kBuffers = 2;                        // KV blocks in shared memory; block i lives in buffer i % 2
  static constexpr int kHalfTiles = Base::kValueTiles / 2;  // column tiles of the output that one consumer owns
  static constexpr int kLeftParts = 2;                      // parts that hold the left half of the value columns

  static_assert(Base::kHeads == Base::kSlots, "query, key and probability tiles share one size");
  static_assert(Base::part_begin(kLeftParts) == kHalfTiles, "parts must not straddle the halves that are freed");
};

// Heads are the columns of the products, slots or value channels their rows: 16 or 32 heads cost no more than that.
template <int kDQk, int kHeads, bool kSplit>
struct FewHeads : Sizes<kDQk, kHeads, kSplit> {
  using Base = Sizes<kDQk, kHeads, kSplit>;
  static constexpr bool kTransposed = true;
  // The room that the smaller Q leaves holds more of the KV blocks to come: there are three buffers for the first
  // parts of a block and two for the others.
  static constexpr int kBuffers = 3;
  static constexpr int kShallowBuffers = 2;
  static constexpr int kDeepParts = kDQk == 576 && kHeads == 32 ? 2 : 3;
  static constexpr int kDeepTiles = Base::part_begin(kDeepParts);
  static constexpr int kShallowTiles = Base::kKeyTiles - kDeepTiles;

  static_assert(kHeads == 16 || kHeads == 32);
  static_assert(kDeepParts < Base::kParts, "the last part has fewest buffers: P and validity words are kept like it");
};

}  // namespace cupymla::sparse_mla_fwd
