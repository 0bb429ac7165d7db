// Shared memory and barriers of the backward's first phase.
//
// barrier        | arrivals                          | who waits      | what it says
// ---------------+-----------------------------------+----------------+------------------------------------------
// q_full         | 1 + bytes (TMA of both CTAs)      | MMA            | Q of the query is in, in both CTAs
// q_free         | 1 (commit to the pair)            | query warp     | no product reads Q any more
// k_full[s]      | 1 + bytes (gathers of both CTAs)  | MMA            | stage s holds a block's rows
// k_free[s]      | 1 (commit to the pair)            | gather warps   | the products that read stage s are done
// scores_full[a] | 1 (commit to the pair)            | score warps    | accumulator a holds a block's scores
// scores_free[a] | 8 score warps of both CTAs        | MMA            | accumulator a has been read
// cluster        | every thread of both CTAs         | all of them    | barriers and Tensor Memory are set up; or
//                |                                   |                | all work is done
//
// q_full, k_full and scores_free are used in the even CTA alone: its MMA warp issues the products of both.
//
//   time | gather (warps 0, 1)  | MMA (warp 2, even CTA)     | scores (warps 4-7)       | delta (warps 8-11)
//   -----+----------------------+----------------------------+--------------------------+-------------------
//    |   | rows of block 0      |                            |                          | out . dout of the
//    |   | rows of block 1      | Q K^T of block 0 into 0    |                          | first query
//    |   | rows of block 2      | Q K^T of block 1 into 1    | mask block 0, store p    | of the next one
//    v   |   ...                |   ... into 0               | mask block 1, store p    |   ...
//  next  | rows of its block 0  | (warp 3 loads its Q)       | mask the last, store p   |
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_bwd_phase1 {

template <typename Config>
struct alignas(1024) Storage {
  uint8_t q[Config::kTiles][Config::kTileBytes];
  uint8_t k[Config::kStages][Config::kTiles][Config::kTileBytes];

  Mbarrier q_full, q_free;
  Mbarrier k_full[Config::kStages], k_free[Config::kStages];
  Mbarrier scores_full[Config::kAccumulators], scores_free[Config::kAccumulators];
  uint32_t tmem;  // address of the accumulators
  int32_t entries[Config::kMostQueries];  // that can be valid, of each query; the even CTA has read them for both
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_bwd_phase1
