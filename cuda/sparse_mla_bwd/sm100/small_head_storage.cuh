// Shared memory and barriers of the small-head variant; storage.cuh has those for more heads.
//
// barrier        | arrivals                         | who waits | what it says
// ---------------+----------------------------------+-----------+--------------------------------------------------
// heads_full     | 1 + bytes (TMA)                  | MMA,      | Q and dO are in
//                |                                  | workers   |
// delta_full     | 16 worker warps of both CTAs     | workers   | both halves of delta are out, lse and shares too
// k_full         | 1 + bytes (TMA)                  | MMA       | the block's keys are in
// k_free         | 1 (commit)                       | producer  | S, dP and dQ are done with them
// entries_full[s] | 1 producer                       | workers,  | the block's tokens and validity are out, in set s
//                |                                  | reducers  |
// scores_full[i] | 1 (commit)                       | workers   | this CTA's part of S (0), dP (1) is in Tensor
//                |                                  |           | Memory
// received[i]    | 1 + bytes (the other CTA's       | workers   | the other CTA's part of S, dP is in `staging`
//                | workers)                         |           |
// tiles_full     | 16 worker warps of both CTAs +   | MMA       | P and dS of the block are out; S, dP and
//                | bytes (the other CTA's workers)  |           | `staging` have been read
// tiles_free     | 2 (commits of both CTAs)         | workers   | all products of the block are done, in both CTAs
// part_full[i]   | 1 (commit)                       | reducers  | a part of dKV is in place i of the ring
// part_free[i]   | 4 reducer warps                  | MMA       | it has been read
// named 1        | 256 workers                      | workers   | the second warpgroup's sums for the distribution,
//                |                                  |           | or all of dQ, are out
// cluster        | every thread of both CTAs        | all       | set up; the query is over; nobody reaches for the
//                |                                  |           | other CTA again
//
// As where heads are many, each CTA has half of the channels of everything, and the two exchange their parts of S and
// dP, then P and dS. Entries are rows of S and heads its columns, and each CTA finishes 32 of the 64 heads.
//
// What has no "free" side: `staging`, S and dP are written again for the next block, which comes after tiles_full in
// the MMA thread; sums of the distribution likewise. Of tokens there are four sets, and the producer writes block
// i + 4's over block i's once dQ of block i + 3 is done: by then all parts of block i + 2 are in the ring, which has
// fewer places, or through it, so the reducers are past block i + 1.
//
//   time | MMA                          | workers                    | reducers           | producer
//   -----+------------------------------+----------------------------+--------------------+-------------------------
//    |   | dQ += K^T dS of block i      |                            | dKV of block i - 1 |
//    |   | three parts of dKV, block i  |                            |                    | gather block i + 1
//    |   | S, dP of block i + 1         |                            | dKV of block i     |
//    |   | other parts of dKV, block i  | exchange S and dP; P, dS   |                    |
//    v   |                              | P and dS -> both CTAs      |                    |
//  query | dQ += ...                    | dQ -> global memory        |                    |
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename ConfigArg>
struct alignas(1024) SmallHeadStorage {
  using Config = ConfigArg;

  uint8_t q[Config::kTiles][Config::kHeadTileBytes];
  uint8_t dout[Config::kOwnTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kTiles][Config::kKeyTileBytes];   // after the last block dQ, heads x own channels
  uint8_t p[Config::kKeyTileBytes];                   // entries x heads
  uint8_t ds[Config::kKeyTileBytes];                  // entries x heads
  float4 staging[2][Config::kWorkerColumns / 4][Config::kWorkerThreads];  // S and dP: for each worker its peer's part

  float delta[Config::kCluster][Config::kHeads];  // over each CTA's channels
  // Of each head; lse and factor are what `Log2Lse` is, lse +inf where there is no head.
  float lse[Config::kHeads];
  float factor[Config::kHeads];
  float share[Config::kHeads];         // what the sink leaves of the softmax, times the factor
  float distribution[Config::kTileKeys];  // sums over the second warpgroup's heads
  // A token is -1 where its entry is not valid.
  int32_t tokens[Config::kSets][Config::kTileKeys];
  uint32_t valid[Config::kSets][Config::kKeyWords];   // one bit per entry

  Mbarrier heads_full, delta_full;
  Mbarrier k_full, k_free, entries_full[Config::kSets];
  Mbarrier scores_full[2], received[2];
  Mbarrier tiles_full, tiles_free;
  Mbarrier part_full[Config::kPlaces], part_free[Config::kPlaces];
  uint32_t tmem;
  int32_t entries;  // of the query, in the first CTA

  static constexpr int kQueryGradientRow = Config::kTiles * static_cast<int>(kSwizzleRowBytes);
  static_assert(Config::kHeads * kQueryGradientRow <= static_cast<int>(sizeof(k)));
};

constexpr uint32_t kWorkers = 1;  // a named barrier

static_assert(sizeof(SmallHeadStorage<SmallHead<576, false>>) <= 227 * 1024);
static_assert(sizeof(SmallHeadStorage<SmallHead<512, false>>) <= 227 * 1024);

}  // namespace cupymla::sparse_mla_bwd
