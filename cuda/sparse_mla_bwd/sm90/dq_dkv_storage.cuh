// Numbers, shared memory and barriers of the kernel `dq_dkv`: 192 columns of a query's dQ and of what its entries add
// to dKV.
//
// barrier    | arrivals                                  | who waits | what it says
// -----------+-------------------------------------------+-----------+----------------------------------------------
// heads_full | 1 and bytes (TMA)                         | consumers | Q and dO are in
// full[set]  | 1 and bytes (P and dS), 128 producers,    | consumers | a block is in: P, dS, keys and tokens
//            | when their copies of keys have landed, 4  |           |
//            | for the tokens                            |           |
// free[set]  | 256 consumers                             | producer  | nothing reads the block any more
//
// Of dQ each consumer has 64 heads, of every block. Of dKV they have blocks in turn, all columns: while one sends its
// block's rows, which takes L2 as long as all products take tensor cores, the other multiplies its own.
//
//   time | consumer 0                             | consumer 1                             | producer
//   -----+----------------------------------------+----------------------------------------+----------------------
//    |   | dQ and dKV of block 0                  | dQ of block 0                          | P, dS, keys of block 1
//    |   | dQ of block 1; dKV of block 0 -> L2    | dQ and dKV of block 1                  | of block 2, behind 0
//    v   | dQ and dKV of block 2                  | dQ of block 2; dKV of block 1 -> L2    | of block 3, behind 1
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/sm90/warpgroups.cuh"
#include "stored_p_ds.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, int kPartialsArg>
struct DqDkvConfig : sm90::Warpgroups<2, 40, 232> {
  static constexpr bool kPartials = kPartialsArg != 0;  // whether every entry's dKV row is stored on its own
  static constexpr bool kPacked = kPartialsArg == 2;    // in 16 bits a column
  static constexpr int kDQk = kDQkArg;
  static constexpr int kDV = 512;
  static constexpr int kGroups = kPdsGroups;     // of 64 heads, one for each consumer's dQ
  static constexpr int kHeads = kPdsHeads;       // of a group
  static constexpr int kTileKeys = kPdsKeys;
  static constexpr int kTileColumns = 64;
  static constexpr int kKeyTiles = kDQk / kTileColumns;
  static constexpr int kValueTiles = kDV / kTileColumns;
  static constexpr int kTiles = 3;  // of a CTA; the last one of a query may have fewer
  static constexpr int kSplits = (kKeyTiles + kTiles - 1) / kTiles;  // CTAs of a query
  static constexpr int kTileBytes = kTileKeys * static_cast<int>(kSwizzleRowBytes);
  static constexpr int kSets = 2;

  static_assert(kDQk == 576 || kDQk == 512);
  static_assert(kTileBytes == kPdsTileBytes, "query, key and weight tiles share one size");
  static_assert(kGroups == kConsumers);
};

template <typename Config>
struct alignas(1024) DqDkvStorage {
  uint8_t q[Config::kGroups][Config::kTiles][Config::kTileBytes];
  uint8_t dout[Config::kGroups][Config::kTiles][Config::kTileBytes];
  uint8_t k[Config::kSets][Config::kTiles][Config::kTileBytes];
  uint8_t p_ds[Config::kSets][Config::kGroups][2][Config::kTileBytes];     // P, dS
  int32_t tokens[Config::kSets][Config::kTileKeys];                        // -1 where an entry is not valid

  Mbarrier heads_full;
  Mbarrier full[Config::kSets];
  Mbarrier free[Config::kSets];

  __device__ __forceinline__ void init() {
    heads_full.init(1);
    for (int set = 0; set < Config::kSets; ++set) {
      full[set].init(1 + Config::kWarpgroup + 4);
      free[set].init(Config::kConsumerThreads);
    }
    fence_mbarrier_init();
  }
};

static_assert(sizeof(DqDkvStorage<DqDkvConfig<576, 0>>) <= 227 * 1024);

// Which columns of its query a CTA has. CTAs begin in the order of blockIdx.x, then of blockIdx.y: either all of a
// query's at about the same time, which read P and dS from memory once, or (a grid of two extents) those of all queries
// for the first columns before the others, for which fewer bytes of kv and of sums have to be in L2.
template <typename Config>
struct ColumnSplit {
  static __device__ __forceinline__ uint32_t place() {  // of its query
    return gridDim.y == 1 ? blockIdx.x / Config::kSplits : blockIdx.x;
  }
  static __device__ __forceinline__ uint32_t number() {
    return gridDim.y == 1 ? blockIdx.x % Config::kSplits : blockIdx.y;
  }
  static __device__ __forceinline__ int first_tile() { return static_cast<int>(number()) * Config::kTiles; }
  static __device__ __forceinline__ bool is_last() { return number() == Config::kSplits - 1; }
  // Tiles of the CTA that has the last columns, or of any other one, and how many of them are values.
  static __host__ __device__ constexpr int tiles(bool last) {
    return last ? Config::kKeyTiles - (Config::kSplits - 1) * Config::kTiles : Config::kTiles;
  }
  static __host__ __device__ constexpr int value_tiles(bool last) {
    return last ? Config::kValueTiles - (Config::kSplits - 1) * Config::kTiles : Config::kTiles;
  }
};

}  // namespace cupymla::sparse_mla_bwd
