// Shared memory and barriers of the attention stage where heads are many; few_heads_storage.cuh has those where they
// are few.
//
// barrier        | arrivals                         | who waits | what it says
// ---------------+----------------------------------+-----------+--------------------------------------------------
// heads_full     | 1 + bytes (TMA)                  | MMA,      | Q and dO of the pass are in
//                |                                  | workers   |
// delta_full     | 16 worker warps of both CTAs     | workers   | both halves of delta are out
// k_full         | 1 + bytes (TMA)                  | MMA       | the block's keys are in
// k_free         | 1 (commit)                       | producer  | S, dP and dQ are done with them
// slots_full[s]  | 1 producer                       | workers   | the block's tokens and validity are out, in set s
// scores_full[i] | 1 (commit)                       | workers   | this CTA's part of S (0), dP (1) is in Tensor
//                |                                  |           | Memory
// received[i]    | 1 + bytes (the other CTA's       | workers   | the other CTA's part of S, dP is in `staging`
//                | workers)                         |           |
// consumed       | 16 worker warps of both CTAs     | workers   | `staging` of both has been read
// tiles_full     | 16 worker warps of both CTAs +   | MMA       | P and dS of all slots are out; S and dP, and dKV
//                | bytes (the other CTA's workers)  |           | of the block before, have been read
// dkv_full[i]    | 1 (commit)                       | workers   | the block's dKV is in Tensor Memory: the RoPE
//                |                                  |           | and the first 128 channels (0), all (1)
// tiles_free     | 2 (a worker of each CTA)         | workers   | no product reads P and dS any more, in either CTA
// sums_free      | 8 worker warps                   | MMA       | dKV of the value channels has been read: S and dP
//                |                                  |           | may take its place
// named 1, 2     | 128 workers of a warpgroup       | the same  | each warp's share of the distribution is out (met
//                |                                  |           | twice for each block)
// cluster        | every thread of both CTAs        | all       | set up; a pass is over; nobody reaches for the
//                |                                  |           | other CTA again
//
// S and dP are sums over all channels, of which either CTA has half. It adds what the other one has of 32 slots, makes
// P and dS of those, and both write to both CTAs' tiles. All that follows needs no exchange: each CTA has its own
// channels of dQ and of the block's dKV, for all heads, so a row of dKV crosses to L2 once.
//
//   time | MMA                          | workers                                | producer
//   -----+------------------------------+----------------------------------------+---------------------------------
//    |   | S of block i                 | reduce dKV of block i - 1              |
//    |   | dP of block i                | S: hand over 32 slots, take over 32; P |
//    |   |                              | dP: the same; P, dS -> both CTAs       |
//    |   | dQ += dS K                   |                                        | (keys free)
//    |   | dK = Q^T dS, dV = dO^T P     |                                        | gather block i + 1
//    v   |                              | dKV -> registers                       |
//  pass  |                              | dQ -> global memory                    | Q and dO of the next heads
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename ConfigArg>
struct alignas(1024) Storage {
  using Config = ConfigArg;

  uint8_t q[Config::kTiles][Config::kHeadTileBytes];
  uint8_t dout[Config::kOwnTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kTiles][Config::kSlotTileBytes];
  union {
    struct {
      uint8_t p[Config::kHeadTileBytes];   // heads x slots
      uint8_t ds[Config::kHeadTileBytes];  // heads x slots
    };
    float4 staging[2][Config::kWorkerColumns / 4][Config::kWorkerThreads];  // S and dP: for each worker its twin's part
  };

  float delta[Config::kCluster][Config::kHeads];  // over each CTA's channels
  float distribution[2][4][Config::kWorkerColumns];  // sums over the heads of each worker warp
  // Two sets, for even and odd blocks. A token is -1 where its slot is not valid.
  int32_t tokens[Config::kSets][Config::kSlots];
  uint32_t valid[Config::kSets][Config::kSlotWords];  // one bit per slot

  Mbarrier heads_full, delta_full;
  Mbarrier k_full, k_free, slots_full[Config::kSets];
  Mbarrier scores_full[2], received[2], consumed;
  Mbarrier tiles_full, tiles_free;
  Mbarrier part_full[Config::kPlaces], part_free[Config::kPlaces];
  uint32_t tmem;
  int32_t slots;  // of the query, in the first CTA
};

constexpr uint32_t kDistribution = 1;  // the first of two named barriers

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<ManyHeads<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<ManyHeads<512, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_bwd
