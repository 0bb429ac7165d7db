// Numbers, shared memory and barriers of the attention's second half.
//
// barrier    | arrivals                                | who waits | what it says
// -----------+-----------------------------------------+-----------+-----------------------------------------------
// heads_full | 1 + bytes (TMA)                         | consumers | Q and dO of the pass are in
// heads_ready| 256 consumers                           | consumers | their columns are in order
// heads_free | 256 consumers                           | producer  | nothing reads them any more
// full[set]  | 1 + bytes (P and dS), 128 copy arrivals | consumers | a block is in: P, dS, keys and tokens
//            | (keys), 4 for the tokens                |           |
// free[set]  | 256 consumers                           | producer  | nothing reads it any more
//
// A CTA has 192 columns of a query: three tiles of keys, two of them `sides` and one the `middle`. Of dQ each consumer
// has 64 heads; of dKV it has one side and half of the middle. Nothing crosses from one consumer to the other, so while
// one sends the other multiplies.
//
//   time | a consumer                                       | producer
//   -----+--------------------------------------------------+-----------------------------
//    |   | dQ and the side of block i are multiplied, while | P, dS, keys of block i + 1
//    |   | the middle of block i - 1 is sent                |
//    v   | the middle is multiplied, while the side is sent |
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/registers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, bool kPartialsArg>
struct GradientConfig {
  static constexpr bool kPartials = kPartialsArg;  // whether every slot's dKV row is stored on its own
  static constexpr int kDQk = kDQkArg;
  static constexpr int kDV = 512;
  static constexpr int kGroups = 2;     // of 64 heads, one for each consumer's dQ
  static constexpr int kHeads = 64;     // of a group
  static constexpr int kSlots = 64;     // of a block
  static constexpr int kTileColumns = 64;
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kTiles = 3;      // of a CTA
  static constexpr int kMiddle = 2;     // which of them is the middle
  static constexpr int kShares = (kKeyTiles + kTiles - 1) / kTiles;
  // Of the CTA with the last columns, or of any other one.
  static __host__ __device__ constexpr int tiles(bool last) {
    return last ? kKeyTiles - (kShares - 1) * kTiles : kTiles;
  }
  static constexpr int kTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kSets = 2;
  // P and dS of a block, which come to all CTAs of a query at once, a piece from each.
  static constexpr uint32_t kScoreBytes = kGroups * 2 * kTileBytes;
  static constexpr uint32_t kPieceBytes = (kScoreBytes / kShares + 15) / 16 * 16;

  static constexpr int kWarpgroup = 128;
  static constexpr int kConsumerThreads = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kWarpgroupRegisters = kProducerRegisters + 2 * kConsumerRegisters;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kHeads == kSlots, "query, key and score tiles share one size");
  static_assert(kWarpgroupRegisters <= pool_registers(kThreads), "the pool that the CTA gets at launch");
};

template <typename Config>
struct alignas(1024) GradientStorage {
  uint8_t q[Config::kGroups][Config::kTiles][Config::kTileBytes];
  uint8_t dout[Config::kGroups][Config::kTiles][Config::kTileBytes];
  uint8_t k[Config::kSets][Config::kTiles][Config::kTileBytes];
  uint8_t scores[Config::kSets][Config::kGroups][2][Config::kTileBytes];  // P, dS
  int32_t tokens[Config::kSets][Config::kSlots];                          // -1 where a slot is not valid
  int32_t slots;                                                          // that can be valid

  Mbarrier heads_full;
  Mbarrier heads_ready;
  Mbarrier heads_free;
  Mbarrier full[Config::kSets];
  Mbarrier free[Config::kSets];
  Mbarrier scores_free[Config::kSets];
  Mbarrier slots_in;
};

static_assert(sizeof(GradientStorage<GradientConfig<576, false>>) <= 227 * 1024);

}  // namespace cupymla::sparse_mla_bwd
