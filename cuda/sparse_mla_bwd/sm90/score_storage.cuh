// Numbers, shared memory and barriers of the attention's first half.
//
// barrier         | arrivals                            | who waits    | what it says
// ----------------+-------------------------------------+--------------+-----------------------------------------------
// heads_full      | 1 + bytes (TMA)                     | consumers    | Q and dO of the heads are in the ring
// heads_read      | 256 consumers                       | producer     | they are in registers: their places may be
//                 |                                     |              | filled with keys
// heads_free      | 256 consumers                       | producer     | no product reads the last heads' keys any
//                 |                                     |              | more: Q and dO of the next may come
// statistics_out  | 256 consumers                       | consumers    | row statistics of the heads are out; at their
//                 |                                     |              | end: nobody reads them any more
// full[place]     | 128 copy arrivals, 4 for the        | consumers    | three column tiles of a block are in (and,
//                 | validity words                      |              | with its first three, which slots are valid)
// free[place]     | 256 consumers                       | producer     | nothing reads them any more
// turn[c]         | 128 of the other consumer           | consumer c   | the other's products are all but issued
// tiles_free[set] | 1 thread of consumer 1              | consumer 0   | the P and dS that were here are on their way
// p_ready[set][h] | 128 consumer 0                      | consumer 1   | P of half of the block's slots is out, as what
//                 |                                     |              | it is rounded and what that loses
// named 1         | 128 consumer 0                      | consumer 0   | each warp's share of the distribution is out
//                 |                                     |              | (all warps have read the last)
// named 2         | 128 consumer 1                      | consumer 1   | dS is out: its first thread stores the set
//
// Q is in consumer 0's registers and dO in consumer 1's, for all blocks; shared memory is for keys.
//
//   time | consumer 0                 | consumer 1                       | producer
//   -----+----------------------------+----------------------------------+------------------------------------
//    |   | S = Q K^T of block i       | dS of block i - 1 -> set         | gather, up to two blocks ahead
//    |   | P -> set                   | P, dS of block i - 1 -> global   |
//    v   | S of block i + 1           | dP = dO V^T of block i           |
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/registers.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg>
struct ScoreConfig {
  static constexpr int kDQk = kDQkArg;  // channels of a key
  static constexpr int kDV = 512;       // channels of a value: the first ones of the key
  static constexpr int kHeads = 64;     // of a CTA at a time: one wgmma M
  static constexpr int kSlots = 64;     // of a block
  static constexpr int kTileColumns = 64;
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kTileBytes = kSlots * static_cast<int>(kSwizzleRowBytes);

  // A block comes in parts of three column tiles, into places of a ring.
  static constexpr int kPartTiles = 3;
  static constexpr int kParts = (kKeyTiles + kPartTiles - 1) / kPartTiles;
  static constexpr int kPlaces = 7;
  // The places behind the first ones hold Q but for its last part, then dO, before keys.
  static constexpr int kKeyPlaces = kPlaces - (2 * kParts - 1);
  static constexpr int kRegisterTiles = (kParts - 1) * kPartTiles;  // of Q; the others stay in shared memory
  static constexpr int kSets = 2;       // of a P and a dS tile
  static constexpr int kTurnTile = kValueTiles - 1;  // before which a consumer's turn ends
  static constexpr int kWordSets = 8;   // blocks whose validity words are kept

  static constexpr int kWarpgroup = 128;
  static constexpr int kConsumerThreads = 2 * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kWarpgroupRegisters = kProducerRegisters + 2 * kConsumerRegisters;

  // Tiles of a part; of keys or, with kValues, of values.
  template <bool kValues>
  static __host__ __device__ constexpr int part_tiles(int part) {
    const int left = (kValues ? kValueTiles : kKeyTiles) - part * kPartTiles;
    return left < kPartTiles ? left : kPartTiles;
  }

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kKeyPlaces >= 0 && part_tiles<true>(kParts - 1) > 0);
  static_assert(kWarpgroupRegisters <= pool_registers(kThreads), "the pool that the CTA gets at launch");
};

template <typename Config>
struct alignas(1024) ScoreStorage {
  uint8_t k[Config::kPlaces][Config::kPartTiles][Config::kTileBytes];
  uint8_t q_last[Config::kPartTiles][Config::kTileBytes];  // of Q
  uint8_t set[Config::kSets][2][Config::kTileBytes];  // heads x slots: P; dS, first what P loses when it is rounded

  // Of each head, as in `Storage`.
  float lse[Config::kHeads];
  float factor[Config::kHeads];
  float share[Config::kHeads];
  float delta[Config::kHeads];
  float distribution[4][Config::kSlots];  // of the heads of each warp of consumer 0

  // One bit per slot; consumers read the four words as one of 64 bits.
  alignas(8) uint16_t valid[Config::kWordSets][Config::kSlots / 16];
  int32_t slots;  // that can be valid

  Mbarrier heads_full;
  Mbarrier heads_read;
  Mbarrier heads_free;
  Mbarrier statistics_out;
  Mbarrier full[Config::kPlaces];
  Mbarrier free[Config::kPlaces];
  Mbarrier turn[2];
  Mbarrier tiles_free[Config::kSets];
  Mbarrier p_ready[Config::kSets][2];

  // Tiles of Q, and of dO, where they wait to be read.
  __device__ __forceinline__ uint8_t* q(int tile) {
    return tile < Config::kRegisterTiles ? k[Config::kKeyPlaces][0] + tile * Config::kTileBytes
                                         : q_last[tile - Config::kRegisterTiles];
  }
  __device__ __forceinline__ uint8_t* dout(int tile) {
    return k[Config::kKeyPlaces + Config::kParts - 1][0] + tile * Config::kTileBytes;
  }
};

static_assert(sizeof(ScoreStorage<ScoreConfig<576>>) <= 227 * 1024);
static_assert(sizeof(ScoreStorage<ScoreConfig<512>>) <= 227 * 1024);

}  // namespace cupymla::sparse_mla_bwd
