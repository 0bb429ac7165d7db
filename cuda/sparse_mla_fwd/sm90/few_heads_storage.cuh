// Shared memory and barriers where heads are few; storage.cuh has those where they are many.
//
// barrier             | arrivals                                | who waits | what it says
// --------------------+-----------------------------------------+-----------+------------------------------------------
// q_full              | 1 + bytes (TMA)                         | consumers | Q is in, number of blocks is out
// q_free              | 128 scores, 128 values                  | producer  | all scores of the query are done, number
//                     |                                         |           | of blocks has been read
// full[s][part]       | 128 copy arrivals; last part 4 more for | scores,   | these columns of a block, in buffer s of
//                     | the validity words                      | then by   | theirs (and, last part, the block's
//                     |                                         | chain     | validity) are in
// free[s][part]       | 128 values                              | producer  | these columns may be refilled; parts with
//                     |                                         |           | three buffers have no such barrier
// p_ready[s]          | 128 scores                              | values    | P of a block is out, and what the output
//                     |                                         |           | has to be multiplied by before it
// statistics_ready[s] | 128 scores                              | values    | what makes the output of query s % 2 a
//                     |                                         |           | result is out
// named 1             | 128 scores                              | scores    | all warps' maxima, or sums, are out
// named 2 (split)     | 128 scores, 128 values                  | both      | Q and all keys are done with
// named 3             | 128 producers                           | producers | valid slots of the query are counted
// cluster (split)     | 256 consumers of each CTA               | all       | what the CTAs leave is out; then: it has
//                     |                                         |           | been read
//
// The scores warpgroup multiplies every block's keys by Q and takes the softmax over the slots, which are the rows of
// its accumulator; the values warpgroup multiplies the block's values by P. What the first hands the second needs no
// "free" side: P, validity words and factors of a block lie in as many places as its last part, and that part is
// refilled, which scores wait for before they write again, only after the values warpgroup has done everything with
// the block. Nor do the parts with three buffers: when block i + 3 comes, the last part of block i + 2 has already
// waited for block i. Results of the softmax have two places: scores are at most one query ahead, because q_free wants
// both warpgroups.
//
//   time | scores                          | values                         | producer
//   -----+---------------------------------+--------------------------------+------------------------------------
//    |   | S^T = K1 Q^T, part by part      | O^T += V0^T P0^T, part by part | gather the first parts of block 2
//    |   |    as they arrive               |                                |    into their third buffers,
//    |   | column maxima, exchanged        | free 0, part by part           |    its last parts where block 0's
//    |   | exponentials, P1 -> smem        |                                |    were
//    v   | S^T = K2 Q^T ...                | O^T += V1^T P1^T ...           | gather block 3 ...
//  query | sums, exchanged; lse; factors   | O^T times factors, transposed  | already gathers the next query's
//  ends  | -> smem                         | in registers, -> global memory | blocks; Q when scores are done
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/ring.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr uint32_t kColumnsOut = 1;  // named barrier, beside those of storage.cuh

template <int kDQk, int kHeads, bool kSplit>
struct alignas(1024) Storage<FewHeads<kDQk, kHeads, kSplit>> {
  using Config = FewHeads<kDQk, kHeads, kSplit>;

  uint8_t q[Config::kKeyTiles][Config::kHeadTileBytes];
  uint8_t k[Config::kBuffers * Config::kDeepTiles + Config::kShallowBuffers * Config::kShallowTiles]
           [Config::kTileBytes];
  uint8_t p[Config::kShallowBuffers][Config::kHeadTileBytes];  // [heads][slots], swizzled

  // Of each head, what the warps have; two sets in turn, so that one barrier is enough.
  alignas(16) float columns[2][kHeads][4];
  alignas(16) float base_factor[Config::kShallowBuffers][kHeads];
  alignas(16) float output_factor[2][kHeads];  // of even and odd queries
  bool base_moved[Config::kShallowBuffers];    // whether any base factor is not 1

  // One bit per slot of a block; read as one word of 64 bits.
  alignas(8) uint16_t valid[Config::kShallowBuffers][Config::kSlots / 16];

  int32_t blocks;  // of this query, for the consumers
  int32_t counts[2][4];  // as where heads are many
  int32_t tokens[4][Config::kSlots / 4];

  Mbarrier q_full;
  Mbarrier q_free;
  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kShallowBuffers][Config::kParts - Config::kDeepParts];
  Mbarrier p_ready[Config::kShallowBuffers];
  Mbarrier statistics_ready[2];

  __device__ __forceinline__ void init_barriers() {
    constexpr uint32_t kEveryThread = Config::kWarpgroup;
    q_full.init(1);
    q_free.init(kEveryThread * Config::kConsumers);
    for (int buffer = 0; buffer < Config::kBuffers; ++buffer) {
      for (int part = 0; part < Config::kParts; ++part) {
        full[buffer][part].init(kEveryThread + (part == Config::kParts - 1 ? 4 : 0));
      }
    }
    for (int buffer = 0; buffer < Config::kShallowBuffers; ++buffer) {
      for (Mbarrier& part : free[buffer]) part.init(kEveryThread);
      p_ready[buffer].init(kEveryThread);
    }
    for (int set = 0; set < 2; ++set) statistics_ready[set].init(kEveryThread);
    fence_mbarrier_init();
  }
};

// Where a block's parts lie, one block after another.
template <typename Config>
struct Places {};

template <int kDQk, int kHeads, bool kSplit>
struct Places<FewHeads<kDQk, kHeads, kSplit>> {
  using Config = FewHeads<kDQk, kHeads, kSplit>;
  Ring<Config::kBuffers> deep;
  Ring<Config::kShallowBuffers> shallow;

  static __device__ __forceinline__ constexpr bool is_deep(int part) { return part < Config::kDeepParts; }
  static __device__ __forceinline__ constexpr int free_side(int part) { return part - Config::kDeepParts; }
  __device__ __forceinline__ int stage(int part) const { return is_deep(part) ? deep.stage : shallow.stage; }
  __device__ __forceinline__ uint32_t full_parity(int part) const { return is_deep(part) ? deep.full : shallow.full; }
  __device__ __forceinline__ uint32_t free_parity(int) const { return shallow.free(); }

  // A column tile of that part; the part's other tiles follow.
  __device__ __forceinline__ const uint8_t* tile(const Storage<Config>& storage, int part, int tile) const {
    return storage.k[is_deep(part) ? stage(part) * Config::kDeepTiles + tile
                                   : Config::kBuffers * Config::kDeepTiles + stage(part) * Config::kShallowTiles +
                                         tile - Config::kDeepTiles];
  }

  __device__ __forceinline__ void advance() {
    deep.advance();
    shallow.advance();
  }
};

static_assert(sizeof(Storage<FewHeads<576, 32, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<FewHeads<576, 16, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<FewHeads<512, 32, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<FewHeads<512, 16, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
