// Shared memory and barriers of the attention stage where heads are many; small_head_storage.cuh has those where they
// are few.
//
// barrier        | arrivals                         | who waits | what it says
// ---------------+----------------------------------+-----------+--------------------------------------------------
// heads_full     | 1 + bytes (TMA)                  | MMA,      | Q and dO of the head block are in
//                |                                  | workers   |
// delta_full     | 16 worker warps of both CTAs     | workers   | both halves of delta are out
// k_full         | 1 + bytes (TMA)                  | MMA       | the block's keys are in
// k_free         | 1 (commit)                       | producer  | S, dP and dQ are done with them
// entries_full[s] | 1 producer                       | workers,  | the block's tokens and validity are out, in set s
//                |                                  | reducers  |
// scores_full[i] | 1 (commit)                       | workers   | this CTA's part of S (0), dP (1) is in Tensor
//                |                                  |           | Memory
// received[i]    | 1 + bytes (the other CTA's       | workers   | the other CTA's part of S, dP is in `staging`
//                | workers)                         |           |
// consumed       | 16 worker warps of both CTAs     | workers   | `staging` of both has been read
// tiles_full     | 16 worker warps of both CTAs +   | MMA       | P and dS of all entries are out; S and dP have been
//                | bytes (the other CTA's workers)  |           | read
// tiles_free     | 2 (commits of both CTAs)         | workers   | all products of the block are done, in both CTAs
// part_full[i]   | 1 (commit)                       | reducers  | a part of dKV is in Tensor Memory: the first 128
//                |                                  |           | channels (0), the other ones (1), the RoPE (2)
// part_free[i]   | 4 reducer warps                  | MMA       | it has been read: S (0), dP (1), or the next
//                |                                  |           | block's RoPE (2) may take its place
// named 1, 2     | 128 workers of a warpgroup       | the same  | each warp's share of the distribution is out (met
//                |                                  |           | twice for each block)
// cluster        | every thread of both CTAs        | all       | set up; a head block is over; nobody reaches
//                |                                  |           | for the other CTA again
//
// S and dP are sums over all channels, of which either CTA has half. It adds what the other one has of 32 entries,
// makes P and dS of those, and both write to both CTAs' tiles. All that follows needs no exchange: each CTA has its own
// channels of dQ and of the block's dKV, for all heads, so a row of dKV crosses to L2 once.
//
// What has no "free" side: parts 0 and 1 of dKV take the place of S and dP, which comes after tiles_full in the MMA
// thread. Of tokens there are four sets, and the producer writes block i + 4's over block i's once dQ of block i + 3 is
// done: by then S of block i + 3 is where part 0 of block i + 2 was, so the reducers are past block i + 1.
//
//   time | MMA                          | workers                    | reducers           | producer
//   -----+------------------------------+----------------------------+--------------------+-------------------------
//    |   | dQ += dS K of block i        |                            | (idle)             | (keys free)
//    |   | parts 0, 1, 2 of dKV         |                            | take part 0        | gather block i + 1
//    |   | S of block i + 1             |                            | part 0; take 1     |
//    |   | dP of block i + 1            | S: hand over 32 entries,   | parts 0, 1         |
//    |   |                              | take over 32; P            | take part 2        |
//    |   |                              | dP: the same; dS;          | parts 1, 2         |
//    v   |                              | P and dS -> both CTAs      |                    |
//   ends |                              | dQ -> global memory        |                    | Q and dO of the next
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename ConfigArg>
struct alignas(1024) Storage {
  using Config = ConfigArg;

  uint8_t q[Config::kTiles][Config::kHeadTileBytes];
  uint8_t dout[Config::kOwnTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kTiles][Config::kKeyTileBytes];
  union {
    struct {
      uint8_t p[Config::kHeadTileBytes];   // heads x entries
      uint8_t ds[Config::kHeadTileBytes];  // heads x entries
    };
    float4 staging[2][Config::kWorkerColumns / 4][Config::kWorkerThreads];  // S and dP: for each worker its peer's part
  };

  float delta[Config::kCluster][Config::kHeads];     // over each CTA's channels
  float distribution[2][4][Config::kWorkerColumns];  // sums over the heads of each worker warp
  // A token is -1 where its entry is not valid.
  int32_t tokens[Config::kSets][Config::kTileKeys];
  uint32_t valid[Config::kSets][Config::kKeyWords];   // one bit per entry

  Mbarrier heads_full, delta_full;
  Mbarrier k_full, k_free, entries_full[Config::kSets];
  Mbarrier scores_full[2], received[2], consumed;
  Mbarrier tiles_full, tiles_free;
  Mbarrier part_full[Config::kPlaces], part_free[Config::kPlaces];
  uint32_t tmem;
  int32_t entries;  // of the query, in the first CTA
};

constexpr uint32_t kDistribution = 1;  // the first of two named barriers

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<ManyHeads<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<ManyHeads<512, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_bwd
