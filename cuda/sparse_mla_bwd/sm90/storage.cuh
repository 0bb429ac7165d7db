// Shared memory and barriers of the attention stage of a single CTA.
//
// barrier        | arrivals                                 | who waits    | what it says
// ---------------+------------------------------------------+--------------+----------------------------------------
// heads_full     | 1 + bytes (TMA)                          | consumers    | Q and dO of the head block are in
// heads_free     | 256 consumers                            | producer     | nothing reads them any more
// full[0][part]  | 128 copy arrivals; last part 4 more for  | consumers    | these columns of the block (and, last
//                | the validity words                       |              | part, its tokens and validity) are in
// free[0][side]  | 256 consumers, at all three together     | producer     | dQ has the block: its tiles may be
//                |                                          |              | refilled
// tiles_free     | 256 consumers                            | consumer 0   | no product of the last block reads the
//                |                                          |              | P and dS tiles any more
// p_ready[half]  | 128 consumer 0                           | consumer 1   | P of half of its entries is out, as
//                |                                          |              | what it is rounded and what that loses
// ds_ready       | 128 consumer 1                           | consumers    | dS is out, so P is too
// decided        | 256 consumers                            | producer     | queries: `non_finite` says if each
//                |                                          |              | has a head block of its own
// statistics_out | 256 consumers                            | consumers    | its row statistics are out; at its
//                |                                          |              | end: nobody reads them any more
// cleared        | 256 consumers                            | consumers    | queries taken one by one: only the one
//                |                                          |              | whose it is has anything in Q and dO
// named 1        | 128 consumer 0                           | consumer 0   | each warp's share of the distribution
//                |                                          |              | is out (all warps have read the last)
//
// Consumers meet by mbarriers, as they come from different places of the code.
//
// Consumer 0 makes P, consumer 1 makes dS; then each has half of the value columns of dQ, which it keeps in registers,
// and of the block's dKV, which leaves tile by tile for global memory. Of the RoPE tile consumer 0 has dQ and consumer
// 1 dKV. A consumer with registers to spare multiplies its scores of the next block amid the tiles: consumer 1, and
// where there is no RoPE consumer 0 too. Drawn is a block with the RoPE.
//
//   time | consumer 0                      | consumer 1                      | producer
//   -----+---------------------------------+---------------------------------+-----------------------------
//    |   | S = Q K^T                       | (dP = dO V^T)                   | (block i in the buffer)
//    |   | P -> smem                       |    ...                          |
//    |   |    ...                          | dS = P (dP - delta) -> smem     |
//    |   | tile 0 of dKV                   | tile 4 of dKV                   |
//    |   | dQ += dS K, left columns, RoPE; | dQ += dS K, right columns;      |
//    |   | amid it tile 0 is reduced       | amid it tile 4 is reduced       |
//    |   | tile 1; free amid it            | tile 5; free amid it            | gather block i + 1
//    |   | tile 2                          | tile 6; amid its reductions dP  |    ...
//    |   |    ...                          | of block i + 1                  |
//    |   | tile 3                          | tile 7                          |
//    v   |                                 | RoPE of dKV                     |
//   ends | dQ to global memory             | dQ to global memory             | Q and dO of the next heads
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
  uint8_t p[Config::kTileBytes];   // heads x entries
  uint8_t ds[Config::kTileBytes];  // heads x entries; first what P loses when it is rounded

  // Of each head of the head block; lse and factor are what `Log2Lse` is, lse +inf for heads there are not.
  float lse[Config::kHeads];
  float factor[Config::kHeads];
  float share[Config::kHeads];  // what the sink leaves of the softmax, times the factor
  float delta[Config::kHeads];
  float distribution[4][Config::kTileKeys];  // of the heads of each warp of consumer 0

  // One bit per entry of the block; consumers read the four words as one of 64 bits.
  alignas(8) uint16_t valid[1][Config::kTileKeys / 16];
  // Two sets, for even and odd blocks: the producer writes the next block's before it waits for room.
  int32_t tokens[2][Config::kTileKeys];
  // The same words of each query, where queries are packed: which rows are its own.
  alignas(8) uint16_t query_valid[2][Config::kQueries][Config::kTileKeys / 16];

  uint32_t non_finite;  // several queries: not 0 where each has a head block of its own
  int32_t entries;  // that can be valid, or rows of several queries

  Mbarrier heads_full;
  Mbarrier heads_free;
  Mbarrier full[1][Config::kParts];
  Mbarrier free[1][3];
  Mbarrier tiles_free;
  Mbarrier p_ready[2];
  Mbarrier ds_ready;
  Mbarrier decided;
  Mbarrier statistics_out;
  Mbarrier cleared;
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<576, false, 4>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_bwd
