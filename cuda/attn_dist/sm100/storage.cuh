// Shared memory and barriers of the kernel.
//
// With kHeads = 128 a CTA pair works on a query, with 64 one CTA. "Leader" is the even CTA of a pair, or the CTA.
//
// barrier            | in     | arrivals                         | who waits  | what it says
// -------------------+--------+----------------------------------+------------+---------------------------------------
// head_block_full[p] | each   | 1 and the description's bytes    | all roles  | head block p is described
//                    |        | (st.async by the planner)        |            |
// head_block_free[p] | leader | 4 producers, 4 epilogue warps of | planner    | everybody has read the description
//                    |        | every CTA, the multiplier        |            |
// q_full[t]          | leader | 1 and the bytes of all its CTAs  | multiplier | 64 columns of the head block's Q are in
// q_free[t]          | each   | 1 (commit)                       | producer   | the last products with them are done
// k_full[s]          | leader | 1 and the bytes of all its CTAs  | multiplier | 64 columns of a block of keys are in
// k_free[s]          | each   | 1 (commit)                       | producer   | the products with them are done
// done[a]            | each   | 1 (commit)                       | epilogue   | accumulator a holds a block's products
// taken[a]           | leader | 4 epilogue warps of every CTA    | multiplier | accumulator a has been read
// mass_ready         | each   | 4 epilogue warps of every CTA    | epilogue   | the sums of the row's parts are here
//
// A head block is one walk over a query's blocks with up to kHeads of its heads. Those without blocks use head block
// barriers only.
//
//   time | planner, leader   | producer                 | multiplier (leader)        | epilogue
//   -----+-------------------+--------------------------+----------------------------+----------------------------
//    |   | head block 0      |                          |                            |
//    |   | head block 1      | Q tile 0, keys tile 0    |                            | lse of head block 0
//    |   | head block 2      | Q tile 1, keys tile 1    | block 0, tile 0 -> acc. 0  |
//    |   | head block 3      |   ...                    | block 0, tile 1            |
//    |   | (head block 0     | keys of block 1, tile 0  |   ...                      |
//    |   | read by everybody)|   ...                    | block 1 -> accumulator 1   | exponentials of block 0
//    |   | head block 4      | keys of the last block   |   ...                      |   ...
//    v   |                   | Q tile 0 of head block 1 behind the last products   | the last block's; normalise
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/cluster.cuh"
#include "../../common/ring.cuh"
#include "config.cuh"

namespace cupymla::attn_dist {

// What the planner tells the other roles of a head block; it goes to other CTAs 16 bytes at a time.
struct alignas(16) HeadBlock {
  int32_t first_head;  // negative: there are no more head blocks, and no more of this description
  int32_t heads;       // of this head block, up to kHeads
  int32_t begin_block, end_block;  // that hold the entries that can be valid
  int32_t row_end_block;           // blocks from end_block to this one get zeros
  int32_t batch, query;
  const float* lse;  // of head 0 of the query
  float* dist;       // of the query
  sm100::QueryEntries entries;

  __device__ __forceinline__ bool last() const { return first_head < 0; }
  __device__ __forceinline__ bool empty() const { return begin_block == end_block; }
};

template <typename Config>
struct alignas(1024) Storage {
  uint8_t q[Config::kTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kStages][Config::kKeyTileBytes];

  // Of each head what `Log2Lse` is, the first negated.
  alignas(16) float minus_lse[Config::kEpilogueWarps][Config::kHeads];
  alignas(16) float factor[Config::kEpilogueWarps][Config::kHeads];
  float mass[2][Config::kCtas * Config::kEpilogueWarps];  // for even and odd rows
  HeadBlock head_block[Config::kHeadBlocks];

  Mbarrier head_block_full[Config::kHeadBlocks], head_block_free[Config::kHeadBlocks];
  Mbarrier q_full[Config::kTiles], q_free[Config::kTiles];
  Mbarrier k_full[Config::kStages], k_free[Config::kStages];
  Mbarrier done[Config::kAccumulators], taken[Config::kAccumulators];
  Mbarrier mass_ready;
  uint32_t tmem;
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576, 128>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<576, 64>>) <= kSharedMemoryLimit);

// Heads of a head block that are multiplied.
template <typename Config>
__device__ __forceinline__ int32_t padded_heads(const HeadBlock& head_block) {
  return (head_block.heads + Config::kHeadStep - 1) / Config::kHeadStep * Config::kHeadStep;
}

// A role's place in the ring of head blocks.
template <typename Config>
struct HeadBlockRing {
  Storage<Config>& storage;
  Ring<Config::kHeadBlocks> ring;

  __device__ __forceinline__ explicit HeadBlockRing(Storage<Config>& storage) : storage(storage) {}

  // The next description. To be released by one thread of the role's warp, once all have read it.
  __device__ __forceinline__ const HeadBlock& wait() {
    storage.head_block_full[ring.stage].wait(ring.full);
    return storage.head_block[ring.stage];
  }
  __device__ __forceinline__ void release() {
    cluster_arrive_after_reads_at(cluster_address(smem_address(&storage.head_block_free[ring.stage].state), 0));
  }
  __device__ __forceinline__ void advance() { ring.advance(); }
};

}  // namespace cupymla::attn_dist
