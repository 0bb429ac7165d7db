// Shared memory, barriers and the pipeline.
//
// barrier      | in     | arrivals                       | who waits     | what it says
// -------------+--------+--------------------------------+---------------+-------------------------------------------
// q_full       | even   | 1 + bytes of both CTAs (TMA)   | MMA           | Q of both CTAs is in
// q_free       | each   | 1 (commit to pair)             | producer      | all scores of the query are done
// full[s]      | even   | 1 + bytes of both CTAs (TMA)   | MMA           | stage s of both CTAs is in
// free[s]      | each   | 1 (commit to pair)             | producer      | the products that read stage s are done
// s_ready      | each   | 1 (commit to pair)             | softmax       | the scores of a block are done
// s_free       | even   | 8 softmax warps of each CTA    | MMA           | they have been read
// p_ready      | even   | 8 softmax warps of each CTA    | MMA           | P of the block is out, O has its base
// pv_done      | each   | 1 (commit to pair)             | softmax       | P V of the block is done: P may be written,
//              |        |                                |               | O be rescaled
// o_full       | each   | 1 (commit to pair)             | epilogue      | O of the query is done
// o_free       | even   | 4 epilogue warps of each CTA   | MMA           | O has been read
// stats_ready  | each   | 64 softmax threads             | epilogue      | what makes O a result is out
// stats_free   | each   | 128 epilogue threads           | 64 softmax    | that has been read
// named 1      | each   | 256 softmax threads            | softmax       | maxima of a block, or sums, are out
// cluster      | all    | all threads                    | all           | barriers are ready; (split) what the CTAs
//              |        |                                |               | leave is out; at the end: nobody needs
//              |        |                                |               | another any more
//
// One thread of the even CTA issues all products of the pair. One warp for its lanes arrives at s_free, p_ready and
// o_free, because half of these arrivals cross to the other CTA.
//
//   time | producer, each CTA   | MMA, even CTA       | softmax, each CTA          | epilogue, each CTA
//   -----+----------------------+---------------------+----------------------------+------------------------
//    |   | Q; keys of block 0   | S0 = Q K0           |                            | O of the query before
//    |   | keys of block 1      | S1 = Q K1           | S0 -> registers, free;     |    -> global memory
//    |   |                      |                     | maxima, base, P0 -> smem   |
//    |   | values of block 0    | O  = P0 V0          | S1 -> registers, free;     |
//    |   | keys of block 2      | S2 = Q K2           | maxima, base;              |
//    |   |                      |                     | (P0 V0 done) P1 -> smem    |
//    v   | values of block 1    | O += P1 V1          | ...                        |
//  query | the next query's Q   | O += Pn Vn          | sums -> lse, factors       |
//  ends  | when Sn is done      | next S0, S1         | next S0 -> registers       | O -> global memory
//
// S has one place: softmax has read it before the product that is between two of them is over.
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr uint32_t kExchange = 1;  // named barrier
constexpr uint32_t kSharedMemoryLimit = 227 * 1024;

template <typename Config>
struct alignas(1024) Storage {
  static constexpr int kSides = 4;  // threads that share a head's scores

  uint8_t q[Config::kKeyTiles][sm100::kTileBytes];
  uint8_t p[Config::kSlots / sm100::kGroupSlots][sm100::kTileBytes];  // [heads][slots] of each group of slots
  // A stage holds one tile of keys, of up to 128 slots, or two tiles of values of 64 slots.
  uint8_t stages[Config::kStages][Config::kStageBytes];

  // Of each head, what the threads that share it have; two sets in turn, so that one barrier is enough.
  float exchange[2][kSides][Config::kHeads];
  float output_factor[Config::kHeads];  // negative for a query without a valid slot
  bool occupied[2][kSides];

  Mbarrier q_full, q_free;
  Mbarrier full[Config::kStages], free[Config::kStages];
  Mbarrier s_ready, s_free, p_ready, pv_done;
  Mbarrier o_full, o_free;
  Mbarrier stats_ready, stats_free;
  uint32_t tmem;

  __device__ __forceinline__ void init_barriers() {
    for (Mbarrier& barrier : full) barrier.init(1);
    for (Mbarrier& barrier : free) barrier.init(1);
    q_full.init(1);
    q_free.init(1);
    s_ready.init(1);
    s_free.init(Config::kCtas * Config::kSoftmaxWarps);
    p_ready.init(Config::kCtas * Config::kSoftmaxWarps);
    pv_done.init(1);
    o_full.init(1);
    o_free.init(Config::kCtas * Config::kEpilogueWarps);
    stats_ready.init(Config::kHeads);
    stats_free.init(Config::kEpilogueThreads);
    fence_mbarrier_init();
  }
};

static_assert(sizeof(Storage<Config<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
