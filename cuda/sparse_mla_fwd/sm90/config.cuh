// Numbers of the sm_90a sparse MLA forward kernel, and the budgets they must keep.
#pragma once

#include "../../common/integers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_fwd {

template <int kDQkArg>
struct Config {
  static constexpr int kDQk = kDQkArg;           // channels of a key
  static constexpr int kDV = 512;                // channels of a value: the first ones of the key
  static constexpr int kHeads = 64;              // query heads per CTA: one wgmma M
  static constexpr int kSlots = 64;              // slots per KV block
  static constexpr int kBuffers = 2;             // KV blocks in shared memory; block i lives in buffer i % 2
  static constexpr int kTileColumns = 64;        // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kHalfTiles = kValueTiles / 2;  // column tiles of the output that one consumer owns
  static constexpr int kTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);

  // A KV block arrives in parts, so that the first products start before its last rows are in.
  static constexpr int kParts = 4;
  static __host__ __device__ constexpr int part_begin(int part) { return part == kParts ? kKeyTiles : 2 * part; }
  static constexpr int kLeftParts = 2;  // parts that hold the left half of the value columns

  static constexpr int kWarpgroup = 128;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == kSlots, "query, key and probability tiles share one size");
  static_assert(part_begin(kLeftParts) == kHalfTiles, "parts must not straddle the halves that are freed");
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroup <= 65536, "register file");
};

}  // namespace cupymla::sparse_mla_fwd
