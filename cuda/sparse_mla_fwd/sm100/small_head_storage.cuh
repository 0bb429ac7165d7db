// Shared memory, barriers and the pipeline of the small-head variant: a CTA works by itself; storage.cuh has those
// of a pair. Roles and barriers go by the same names.
//
// A tile of KV, 64 entries x 64 channels, is a key and a value as it lies: each row is gathered once. Its stage is free
// when the product with its values is done.
//
// barrier        | arrivals               | who waits        | what it says
// ---------------+------------------------+------------------+-----------------------------------------------------
// q_full         | 1 + bytes (TMA)        | MMA              | Q's tiles in shared memory are in
// q_staged       | 1 + 4 key warps        | epilogue         | Q's tiles for Tensor Memory are in their stages
//                | + bytes (TMA)          |                  |
// q_kept         | 4 epilogue warps       | key warps        | they have been read, and q_staged has been seen
// q_ready        | 4 epilogue warps       | MMA              | they are in Tensor Memory
// q_free         | 1 (commit)             | epilogue         | all scores of the query are done
// keys[s]        | 1 + bytes (TMA)        | MMA              | keys, which are values, are in stage s
// free[s]        | 1 (commit; of stages   | key warps        | stage s may be filled anew
//                | of Q: epilogue)        |                  |
// rope_full[s]   | 1 + bytes (TMA)        | MMA              | rope keys are in
// rope_free[s]   | 1 (commit)             | key warps        | they have been multiplied
// s_ready        | 1 (commit)             | softmax          | the scores of a block are done, and the products with
//                |                        |                  | the values of the block before it: P may be written, O
//                |                        |                  | be rescaled
// s_free         | 4 softmax warps        | MMA              | the scores have been read
// p_ready        | 4 softmax warps        | MMA              | P of the block is out, O has its base
// o_full         | 1 (commit)             | epilogue;        | O of the query is done; (split) P and the stages are
//                |                        | (split) softmax  | done with
// o_free         | 4 epilogue warps       | MMA              | O has been read
// stats_ready    | 64 softmax threads     | epilogue         | what makes O a result is out
// stats_free     | 128 epilogue threads   | 64 softmax       | that has been read
// lengths_full   | 1 + bytes (st.async)   | all roles        | the lengths of 16 queries are there
//   [b]          |                        |                  |
// lengths_free   | 12 warps of each CTA,  | the warp that    | all roles have taken them
//   [b]          | its products           | reads (rank 0)   |
// named 1        | 128 softmax threads    | softmax          | maxima of a block, or sums, are out
// named 2        | 128 epilogue threads   | epilogue         | the stages of Q have been read
// cluster        | all threads            | all              | barriers are ready; (split) what the CTAs leave is out;
//                |                        |                  | at the end: nobody needs another any more
//
// One warp for its lanes arrives where a whole warp has something to say.
//
//   time | key warps            | MMA                          | softmax                    | epilogue
//   -----+----------------------+------------------------------+----------------------------+---------------------
//    |   | Q; KV of block 0     | S0 = Q K0                    |                            | Q -> shared memory,
//    |   |                      |                              |                            |   Tensor Memory
//    |   | KV of block 1        | S1 = Q K1, the first stage   | S0 -> registers, free;     | O of the query before
//    |   |                      | O  = P0 V0                   | maxima, base, P0 -> smem   |   -> global memory
//    |   | KV of block 2        | S1 += Q K1, the rest         |                            |
//    |   |                      | S2 = Q K2, the first stage   | S1 -> registers, free;     |
//    |   |                      | O += P1 V1                   | maxima, base, P1 -> smem   |
//    v   | ...                  | S2 += Q K2, the rest         | ...                        |
//  query | the next query's Q   | O += Pn Vn                   | sums -> lse, factors       | Q when Sn is done;
//  ends  | and KV               | next S0                      | next S0 -> registers       | O -> global memory
//
// The values of a block come amid the next one's scores: by the time half of the next block is there, the softmax of
// this one is over, and its stages are free again before the gather wants them. So S and P have one place each: when
// the softmax has scores, the product with its last P is done.
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename ConfigArg>
struct alignas(1024) SmallHeadStorage {
  using Config = ConfigArg;

  uint8_t q[Config::kSharedTiles][sm100::kTileBytes];
  uint8_t p[1][sm100::kTileBytes];  // [heads][entries]
  uint8_t stages[Config::kStages][Config::kStageBytes];
  uint8_t ropes[Config::kHasRope ? Config::kRopes : 1][Config::kHasRope ? sm100::kTileBytes : 16];

  // As in a pair's storage.
  float exchange[2][Config::kLaneHalves][Config::kHeads];
  float output_factor[Config::kHeads];
  bool occupied[2][Config::kSoftmaxWarps];

  Mbarrier q_full, q_staged, q_kept, q_ready, q_free;
  Mbarrier keys[Config::kStages], free[Config::kStages];
  Mbarrier rope_full[2], rope_free[2];
  Mbarrier s_ready, s_free, p_ready;
  Mbarrier o_full, o_free;
  Mbarrier stats_ready, stats_free;
  Mbarrier lengths_full[Config::kLengthBatches], lengths_free[Config::kLengthBatches];
  int32_t lengths[Config::kLengthBatches][Config::kLengths];
  uint32_t tmem;

  __device__ __forceinline__ void init_barriers(uint32_t parts) {
    for (int stage = 0; stage < Config::kStages; ++stage) keys[stage].init(1), free[stage].init(1);
    for (int stage = 0; stage < 2; ++stage) rope_full[stage].init(1), rope_free[stage].init(1);
    for (uint32_t batch = 0; batch < Config::kLengthBatches; ++batch) {
      lengths_full[batch].init(1);
      lengths_free[batch].init(parts * (Config::kRoleWarps + 1));
    }
    q_full.init(1);
    q_staged.init(1 + Config::kKeyWarps);
    q_kept.init(Config::kEpilogueWarps);
    q_ready.init(Config::kEpilogueWarps);
    q_free.init(1);
    s_ready.init(1);
    s_free.init(Config::kSoftmaxWarps);
    p_ready.init(Config::kSoftmaxWarps);
    o_full.init(1);
    o_free.init(Config::kEpilogueWarps);
    stats_ready.init(Config::kHeads);
    stats_free.init(Config::kEpilogueThreads);
    fence_mbarrier_init();
  }
};

static_assert(sizeof(SmallHeadStorage<SmallHead<576, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(SmallHeadStorage<SmallHead<512, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
