// Numbers, shared memory and barriers of the kernel `p_ds`: P and dS of 64 heads of a query.
//
// barrier        | arrivals                               | who waits    | what it says
// ---------------+----------------------------------------+--------------+--------------------------------------------
// heads_full[p]  | 1 and bytes (TMA)                      | consumers    | these column tiles of Q and dO are in
// full[s]        | 128 producers, when their copies have  | one consumer | a column tile of a key tile's keys is in
//                | landed, and one lane of each warp      |              | stage s; with the first, its validity words
// free[s]        | 128 of the consumer that has the tile  | producer     | nothing reads stage s any more
// order[c]       | 128 of the other consumer              | consumer c   | all columns of the key tile before its next
//                |                                        |              | have come in: until then a stage may be two
//                |                                        |              | phases behind, which parity does not tell
// statistics_out | 128 of consumer 1                      | all          | lse, shares and delta are in
// named 1, 2     | 128 of a consumer                      | itself       | sums over heads are in (distribution)
// named 3        | 128 producers                          | itself       | whether any entry was valid is known (sink)
//
// Keys come in key tiles of 128 entries, one column tile after another through a ring of stages, and each tile is used
// for both products, S += Q K^T and dP += dO V^T, before it is given back: no more of a key tile has to be there at a
// time than tensor cores work on and memory takes to bring the next. Consumers take turns with key tiles: while one
// makes P and dS of what it has multiplied, in registers, from where they leave, the other multiplies.
//
//   time | consumer 0                        | consumer 1                 | producer
//   -----+-----------------------------------+----------------------------+----------------------------
//    |   | S, dP of key tile 0, tile by tile | delta (the first time)     | tiles of key tile 0, then 1
//    |   | P, dS of key tile 0 -> global     | S, dP of key tile 1        | tiles of key tile 1, then 2
//    v   | S, dP of key tile 2               | P, dS of key tile 1        | tiles of key tile 2, then 3
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "stored_p_ds.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg>
struct PdsConfig : sm90::Warpgroups<2, 72, 216> {
  static constexpr int kDQk = kDQkArg;
  static constexpr int kDV = 512;
  static constexpr int kHeads = kPdsHeads;
  static constexpr int kTileKeys = 2 * kPdsKeys;   // of a key tile
  static constexpr int kTileColumns = 64;          // 16-bit elements in a 128-byte swizzled row
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kHeadParts = 3;  // in which Q and dO come
  static constexpr int kPartTiles = (kKeyTiles + kHeadParts - 1) / kHeadParts;
  static constexpr int kHeadTileBytes = kHeads * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kStages = 5;
  // Validity words of so many key tiles: when those of one are written its consumer has come to the one before that it
  // has, as tiles come in order, so two would be too few, and three would do.
  static constexpr int kWordSets = 4;

  static constexpr int kWarps = kWarpgroup / 32;  // of a warpgroup

  static_assert(kDQk == 576 || kDQk == 512);
};

template <typename Config>
struct alignas(1024) PdsStorage {
  uint8_t q[Config::kKeyTiles][Config::kHeadTileBytes];
  uint8_t dout[Config::kValueTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kStages][Config::kTileBytes];

  // Of each consumer and warp, sums of a key tile's P over heads; two sets, as a warp may be a key tile behind.
  float distribution[Config::kConsumers][2][Config::kWarps][Config::kTileKeys];
  float lse[Config::kHeads], factor[Config::kHeads], share[Config::kHeads], delta[Config::kHeads];
  alignas(16) uint32_t valid[Config::kWordSets][Config::kTileKeys / 32];  // a bit for each entry
  int32_t entries;                                                     // that can be valid
  uint32_t occupied;                                                   // whether any was

  Mbarrier heads_full[Config::kHeadParts];
  Mbarrier full[Config::kStages];
  Mbarrier free[Config::kStages];
  Mbarrier order[Config::kConsumers];
  Mbarrier statistics_out;

  __device__ __forceinline__ void init() {
    for (Mbarrier& part : heads_full) part.init(1);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      full[stage].init(Config::kWarpgroup + Config::kWarps);
      free[stage].init(Config::kWarpgroup);
    }
    for (Mbarrier& consumer : order) consumer.init(Config::kWarpgroup);
    statistics_out.init(Config::kWarpgroup);
    fence_mbarrier_init();
  }
};

static_assert(sizeof(PdsStorage<PdsConfig<576>>) <= 227 * 1024);

}  // namespace cupymla::sparse_mla_bwd
