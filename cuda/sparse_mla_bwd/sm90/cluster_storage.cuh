// Shared memory and barriers of the attention of a 2-CTA cluster.
//
// barrier           | arrivals                              | who waits    | what it says
// ------------------+---------------------------------------+--------------+-----------------------------------------
// heads_full        | 1 + bytes (TMA)                       | consumers    | Q and dO of the head block are in
// full              | 128 copy arrivals; 4 more for the     | consumers    | a block's keys, tokens, validity are in
//                   | validity words                        |              |
// free              | 256 consumers                         | producer     | dQ has the block
// room              | 8 warps of the other CTA's consumers  | consumers    | no product of the last block reads the
//                   |                                       |              | other CTA's P and dS tiles any more
// partial[of][warp] | 1 + bytes (the same warp of the other | that warp    | the other CTA's part of its S, or dP,
//                   | CTA)                                  |              | is in
// ready             | 256 consumers + bytes (the other CTA) | consumers    | P and dS of all heads are out
// delta_in          | 1 + bytes (the other CTA)             | consumers    | its part of delta is in
// distribution_in   | 1 + bytes (rank 1), in rank 0         | consumer 0   | its sums over heads are in
// statistics_out    | 256 consumers                         | consumers    | its row statistics are out; at
//                   |                                       |              | its end, if another follows: nobody
//                   |                                       |              | reads them, or Q and dO, any more
// entries_in        | 1 + bytes (rank 0), in rank 1         | all of them  | `entries` has come
// cluster           | every thread of both CTAs             | all of them  | barriers are set up; a head block but
//                   |                                       |              | the last is over
//
// `room` says that reads are over and publishes no writes; what comes by st.async publishes itself. A CTA's own tiles
// are free when a part of S has come from the other one, which had to have `room` first.
//
// Each CTA has half of the columns of Q, dO and kv, with all 128 heads, and makes P and dS of half of the heads.
//
//   time | either consumer, for a head tile of either CTA          | producer
//   -----+---------------------------------------------------------+------------------------------
//    |   | S = K Q^T, of its columns; the other CTA's heads' sent  | (block i in the buffer)
//    |   | dP = V dO^T, of its columns; amid it P of its own heads |
//    |   |   is made from S and what the other CTA has sent        |
//    |   | the other heads' part of dP sent, dS of its own made    |
//    |   | P and dS to its own tiles and to the other CTA's        |
//    |   | dQ += dS K, of 64 heads; free                           | gather block i + 1
//    |   | dKV of 64 columns, and of 64 others; the first is sent  |
//    v   | (S of block i + 1, amid it the second tile is sent)     |
#pragma once

#include "../../common/barrier.cuh"
#include "cluster_config.cuh"

namespace cupymla::sparse_mla_bwd {

// What the two scores are in arrays of both.
constexpr int kOfScores = 0, kOfScoreGradients = 1;

template <typename Config>
struct alignas(1024) ClusterStorage {
  // Heads are in the order of `head_of_place`: by runs of 32, the CTA's own first, then the other's.
  uint8_t q[Config::kValueTiles][Config::kHeadTileBytes];
  uint8_t dout[Config::kValueTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kValueTiles][Config::kTileBytes];
  // P and dS, entries x 64 heads, of either consumer's heads. In the half of a row that is its own heads' each warp
  // gets, before it makes them, half of what the other CTA sends of S or dP; the other half in `spare`.
  uint8_t p_ds[2][Config::kConsumers][Config::kTileBytes];
  uint8_t spare[2][Config::kTileBytes];
  uint8_t q_rope[Config::kHeads * Config::kRopeRowBytes];
  uint8_t k_rope[Config::kTileKeys * Config::kRopeRowBytes];

  // Of each own head of the head block; lse and factor are what `Log2Lse` is, lse +inf for heads there are not.
  alignas(16) float lse[Config::kOwnHeads];
  float factor[Config::kOwnHeads];
  float share[Config::kOwnHeads];  // what the sink leaves of the softmax, times the factor
  float delta[Config::kOwnHeads];
  float other_delta[Config::kOwnHeads];                   // the other CTA's columns' part
  float distribution[Config::kConsumers][Config::kTileKeys];  // sums over each consumer's own heads
  float other_distribution[Config::kConsumers][Config::kTileKeys];

  alignas(8) uint16_t valid[Config::kTileKeys / 16];  // one bit per entry of the block, read as one word of 64 bits
  int32_t tokens[2][Config::kTileKeys];            // for even and odd blocks

  // Of the query. Read whenever it is wanted: there are no registers to keep it in.
  int32_t entries;  // that can be valid; rank 0 reads them for both CTAs
  uint32_t batch;
  int32_t query;
  uint32_t limit;  // token t can be valid when (uint32_t)t < limit
  int32_t head_block;  // of the consumers; between two head blocks it is written

  Mbarrier heads_full;
  Mbarrier full;
  Mbarrier free;
  Mbarrier room;
  Mbarrier partial[2][Config::kConsumers * 4];
  Mbarrier ready;
  Mbarrier delta_in;
  Mbarrier distribution_in;
  Mbarrier statistics_out;
  Mbarrier entries_in;
};

static_assert(sizeof(ClusterStorage<ClusterConfig<576, false>>) <= 227 * 1024);
static_assert(sizeof(ClusterStorage<ClusterConfig<512, false>>) <= 227 * 1024);

}  // namespace cupymla::sparse_mla_bwd
