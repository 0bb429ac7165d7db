// Shared memory, barriers and the pipeline of a pair; small_head_storage.cuh has those of a CTA by itself.
//
// The pair multiplies Q by keys that are split by entries, CTA 0 having the first 64 of a block, and P by values that
// are split by channels, CTA 0 having the first 256; both CTAs' operands lie at the same places. So half of the key
// tiles of a CTA become its values as they lie. The places of the others are filled a second time, with the same
// channels' other half of the other CTA's entries, once the scores have been multiplied:
//
//   stage of a block | CTA 0: keys, then values         | CTA 1: keys, then values         | P V
//   -----------------+----------------------------------+----------------------------------+----------------------
//   0                | entries 0-63, channels 0-127, kept | entries 64-127, channels 0-127;  | entries 0-63, chunk 0
//                    |                                  | entries 0-63, channels 256-383   |
//   1                | entries 0-63, 128-255, kept      | 64-127, 128-255; 0-63, 384-511   | entries 0-63, chunk 1
//   2                | 0-63, 256-383; 64-127, 0-127     | 64-127, 256-383, kept            | entries 64-127, chunk 0
//   3                | 0-63, 384-511; 64-127, 128-255   | 64-127, 384-511, kept            | entries 64-127, chunk 1
//   rope             | entries 0-63, channels 512-575   | entries 64-127, channels 512-575 | -
//
// barrier       | in   | arrivals                     | who waits  | what it says
// --------------+------+------------------------------+------------+-------------------------------------------------
// q_full        | even | 1 + bytes of both CTAs (TMA) | MMA        | Q's tiles in shared memory are in, of both CTAs
// q_staged      | each | 1 + 2 key warps + bytes (TMA)| epilogue   | Q's tiles for Tensor Memory are in their stages
// q_kept        | each | 4 epilogue warps             | key warps  | they have been read, and q_staged has been seen
// q_ready       | even | 4 epilogue warps of each CTA | MMA        | they are in Tensor Memory
// q_free        | each | 1 (commit to pair)           | value warp,| all scores of the query are done
//               |      |                              | epilogue   |
// keys[s]       | even | 1 + bytes of both CTAs (TMA) | MMA        | keys are in stage s
// keys_read[s]  | each | 1 (commit to pair)           | value warp | they have been multiplied
// values[s]     | even | 1 of each CTA + bytes of one | MMA        | values are in stage s
// free[s]       | each | 1 (commit to pair; of stages | key warps  | stage s may be filled anew
//               |      | of Q: epilogue)              |            |
// rope_full[s]  | even | 1 + bytes of both CTAs (TMA) | MMA        | rope keys are in
// rope_free[s]  | each | 1 (commit to pair)           | key warps  | they have been multiplied
// s_ready       | each | 1 (commit to pair)           | softmax    | the scores of a block are done
// s_free        | even | 4 softmax warps of each CTA  | MMA        | they have been read
// p_ready       | even | 4 softmax warps of each CTA  | MMA        | P of the block is out, O has its base
// pv_done       | each | 1 (commit to pair)           | softmax    | P V of the block is done: P may be written, O be
//               |      |                              |            | rescaled
// o_full        | each | 1 (commit to pair)           | epilogue   | O of the query is done
// o_free        | even | 4 epilogue warps of each CTA | MMA        | O has been read
// stats_ready   | each | 64 softmax threads           | epilogue   | what makes O a result is out
// stats_free    | each | 128 epilogue threads         | 64 softmax | that has been read
// lengths_full  | each | 1 + bytes (st.async)         | all roles  | the lengths of 16 queries are there
//   [b]         |      |                              |            |
// lengths_free  | rank | 11 warps of each CTA, the    | the warp   | all roles have taken them
//   [b]         | 1    | products of each pair        | that reads |
// named 1       | each | 128 softmax threads          | softmax    | maxima of a block, or sums, are out
// named 2       | each | 128 epilogue threads         | epilogue   | the stages of Q have been read
// cluster       | all  | all threads                  | all        | barriers are ready; (split) what the CTAs leave
//               |      |                              |            | is out; at the end: nobody needs another any more
//
// One thread of the even CTA issues all products of the pair. One warp for its lanes arrives where arrivals cross to
// the other CTA.
//
//   time | key, value warps     | MMA, even CTA       | softmax, each CTA          | epilogue, each CTA
//   -----+----------------------+---------------------+----------------------------+------------------------
//    |   | Q; keys of block 0   | S0 = Q K0           |                            | Q -> Tensor Memory
//    |   | keys of block 1;     | S1 = Q K1           | S0 -> registers, free;     | O of the query before
//    |   | values of block 0    |                     | maxima, base, P0 -> smem   |    -> global memory
//    |   | keys of block 2;     | O  = P0 V0          | S1 -> registers, free;     |
//    |   | values of block 1    | S2 = Q K2           | maxima, base;              |
//    |   |                      |                     | (P0 V0 done) P1 -> smem    |
//    v   | ...                  | O += P1 V1          | ...                        |
//  query | the next query's Q   | O += Pn Vn          | sums -> lse, factors       | Q -> Tensor Memory when
//  ends  | when Sn is done      | next S0, S1         | next S0 -> registers       | Sn is done; O -> global
//
// S has one place: softmax has read it before the product that is between two of them is over.
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename ConfigArg>
struct alignas(1024) Storage {
  using Config = ConfigArg;

  uint8_t q[Config::kSharedTiles][sm100::kTileBytes];
  uint8_t p[Config::kCtas][sm100::kTileBytes];  // [heads][entries] of each half of a block
  uint8_t stages[Config::kStages][Config::kStageBytes];
  uint8_t ropes[Config::kHasRope ? Config::kRopes : 1][Config::kHasRope ? sm100::kTileBytes : 16];

  // Of each head, what the two threads that share it have; two sets in turn, so that one barrier is enough.
  float exchange[2][Config::kCtas][Config::kHeads];
  float output_factor[Config::kHeads];  // negative for a query without a valid entry
  bool occupied[2][Config::kSoftmaxWarps];

  Mbarrier q_full, q_staged, q_kept, q_ready, q_free;
  Mbarrier keys[Config::kStages], keys_read[Config::kStages], values[Config::kStages], free[Config::kStages];
  Mbarrier rope_full[2], rope_free[2];
  Mbarrier s_ready, s_free, p_ready, pv_done;
  Mbarrier o_full, o_free;
  Mbarrier stats_ready, stats_free;
  Mbarrier lengths_full[Config::kLengthBatches], lengths_free[Config::kLengthBatches];
  int32_t lengths[Config::kLengthBatches][Config::kLengths];  // entries that can be valid
  uint32_t tmem;

  __device__ __forceinline__ void init_barriers(uint32_t pairs) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      keys[stage].init(1), keys_read[stage].init(1), free[stage].init(1);
      values[stage].init(Config::kCtas);
    }
    for (int stage = 0; stage < 2; ++stage) rope_full[stage].init(1), rope_free[stage].init(1);
    for (uint32_t batch = 0; batch < Config::kLengthBatches; ++batch) {
      lengths_full[batch].init(1);
      lengths_free[batch].init(pairs * (Config::kCtas * Config::kRoleWarps + 1));
    }
    q_full.init(1);
    q_staged.init(1 + Config::kKeyWarps);
    q_kept.init(Config::kEpilogueWarps);
    q_ready.init(Config::kCtas * Config::kEpilogueWarps);
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

static_assert(sizeof(Storage<ManyHeads<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<ManyHeads<512, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
