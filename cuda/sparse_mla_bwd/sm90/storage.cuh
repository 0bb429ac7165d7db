// Shared memory and barriers of the attention stage.
//
// barrier        | arrivals                                 | who waits    | what it says
// ---------------+------------------------------------------+--------------+----------------------------------------
// heads_full     | 1 + bytes (TMA)                          | consumers    | Q and dO of the pass are in
// heads_free     | 256 consumers                            | producer     | nothing reads them any more
// full[0][part]  | 128 copy arrivals; last part 4 more for  | consumers    | these columns of the block (and, last
//                | the validity words                       |              | part, its tokens and validity) are in
// free[0][0]     | 256 consumers                            | producer     | dQ has the block: its left tiles may be
//                |                                          |              | refilled
// free[0][1 + w] | 256 consumers                            | producer     | the same of the two right tiles that are
//                |                                          |              | consumer w's staging, behind the last sums
//                |                                          |              | of the other CTA that pass through
// tiles_free     | 256 consumers                            | consumer 0   | no product of the last block reads the
//                |                                          |              | P and dS tiles any more
// p_ready[half]  | 128 consumer 0                           | consumer 1   | P of half of the block's slots is out, as
//                |                                          |              | what it is rounded and what that loses
// ds_ready       | 128 consumer 1                           | consumers    | dS is out, so P is too
// staging_ready  | 8 warps of the other CTA's consumers     | consumers    | its right key tiles may be written to
// first_ready    | 128 consumer 1                           | consumer 0   | consumer 1 has the block's first sums:
//                |                                          |              | consumer 0's dQ is not in its way
// received[w]    | 1 + bytes (other CTA's consumer w)       | consumer w   | a tile of its sums is in the staging
// drained[w]     | 4 warps of the other CTA's consumer w    | consumer w   | it has read the tile: room for the next
// decided        | 256 consumers                            | producer     | several queries: `apart` says whether each
//                |                                          |              | has a pass of its own
// statistics_out | 256 consumers                            | consumers    | row statistics of the pass are out; at its
//                |                                          |              | end: nobody reads them any more
// cleared        | 256 consumers                            | consumers    | several queries taken apart: only the one
//                |                                          |              | that has the pass has anything in Q and dO
// slots_in       | 1 + bytes (rank 0), in rank 1            | all of them  | `slots` has come
// named 1        | 128 consumer 0                           | consumer 0   | each warp's share of the distribution
//                |                                          |              | is out (all warps have read the last)
// cluster        | every thread of both CTAs                | all of them  | barriers are set up; a pass is over that
//                |                                          |              | is not the last, or has no block
//
// staging_ready and drained say that reads are over and publish no writes; what is received st.async publishes itself.
// Of the mbarriers staging_ready, received, drained and slots_in, and `cluster`, exist for two CTAs to a query only.
// Named 1 is met twice for each block. Consumers meet by mbarriers, as they come from different places of the code.
//
// Consumer 0 makes P, consumer 1 makes dS; then each has half of the value columns of dQ, which it keeps in registers,
// and of the block's dKV, which leaves tile by tile. Of the RoPE tile consumer 0 has dQ and consumer 1 dKV. Where two
// CTAs have 64 heads of a query each, each finishes one tile of every pair: it computes the other one first and stores
// it in the other CTA's key tiles, then its own, adds what the other CTA has stored here, and sends the sum to global
// memory. So a dKV row of 128 heads crosses to L2 once. Consumer 1 multiplies the next tile while one is handed over or
// sent. Drawn are two CTAs. A single one sends every tile straight to
// global memory, its first before dQ, and multiplies what scores of the next block it has registers for amid the tiles.
//
//   time | consumer 0                      | consumer 1                      | producer
//   -----+---------------------------------+---------------------------------+-----------------------------
//    |   | S = Q K^T                       | dP = dO V^T                     | (block i in the buffer)
//    |   | P -> smem                       |    ...                          |
//    |   |    ...                          | dS = P (dP - delta) -> smem     |
//    |   | dQ += dS K, RoPE                | dQ += dS K, right columns       |
//    |   | the other CTA may write to the  | the same                        |
//    |   | right tiles                     |                                 |
//    |   | dQ += dS K, left columns        | tiles 4 | 5 of dKV: exchanged,  |
//    |   | free 0                          | added, reduced                  | gather left of block i + 1
//    |   | tiles 0 | 1                     |    ...                          |
//    |   |    ...                          | tiles 6 | 7                     |
//    v   | tiles 2 | 3; free 1             | RoPE of dKV; free 2 amid left   | gather right of block i + 1
//        |                                 | of the next dP                  |
//  pass  | dQ to global memory             | dQ to global memory             | Q and dO of the next heads
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr uint32_t kDistribution = 1;  // named barrier

template <typename Config>
struct alignas(1024) Storage {
  uint8_t q[Config::kKeyTiles][Config::kTileBytes];
  uint8_t dout[Config::kValueTiles][Config::kTileBytes];
  uint8_t k[1][Config::kKeyTiles][Config::kTileBytes];
  uint8_t p[Config::kTileBytes];   // heads x slots
  uint8_t ds[Config::kTileBytes];  // heads x slots; first what P loses when it is rounded

  // Of each head of the pass; lse and factor are what `Log2Lse` is, lse +inf for heads there are not.
  float lse[Config::kHeads];
  float factor[Config::kHeads];
  float share[Config::kHeads];  // what the sink leaves of the softmax, times the factor
  float delta[Config::kHeads];
  float distribution[4][Config::kSlots];  // of the heads of each warp of consumer 0

  // One bit per slot of the block; consumers read the four words as one of 64 bits.
  alignas(8) uint16_t valid[1][Config::kSlots / 16];
  // Two sets, for even and odd blocks: the producer writes the next block's before it waits for room.
  int32_t tokens[2][Config::kSlots];
  // The same words of each query, where several take their rows together: which rows are its own.
  alignas(8) uint16_t query_valid[2][Config::kQueries][Config::kSlots / 16];

  uint32_t apart;  // several queries: not 0 where each has a pass of its own
  int32_t slots;   // that can be valid, or rows of several queries; rank 0 reads them for both CTAs
  uint32_t other;  // two CTAs: where the other one's Storage lies, for stores across the cluster

  Mbarrier heads_full;
  Mbarrier heads_free;
  Mbarrier full[1][Config::kParts];
  Mbarrier free[1][3];
  Mbarrier tiles_free;
  Mbarrier p_ready[2];
  Mbarrier ds_ready;
  Mbarrier staging_ready;
  Mbarrier first_ready;
  Mbarrier received[Config::kConsumers];
  Mbarrier drained[Config::kConsumers];
  Mbarrier decided;
  Mbarrier statistics_out;
  Mbarrier cleared;
  Mbarrier slots_in;

  // Where the other CTA leaves sums for a consumer: float4 number i of thread t at 16 * (128 i + t).
  __device__ __forceinline__ uint8_t* staging(int consumer) {
    return k[0][Config::kLeftTiles] + consumer * Config::kStagingBytes;
  }
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576, 2, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512, 2, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<576, 1, false, 4>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_bwd
