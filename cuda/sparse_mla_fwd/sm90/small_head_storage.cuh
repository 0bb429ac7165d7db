// Shared memory and barriers of the small-head variant; storage.cuh has those for more heads.
//
// barrier         | arrivals                                | who waits | what it says
// ----------------+-----------------------------------------+-----------+----------------------------------------------
// full[b][part]   | 128 producers, of a block when their    | scores,   | these columns of a block, or of Q, are in
//                 | copies have landed, of Q at once and    | then by   | buffer b; last part: the validity words or
//                 | with bytes (TMA); last part 4 more      | chain     | the number of blocks as well
// free[b][part]   | 128: values of a block, scores of Q     | producer  | these columns of buffer b may be refilled
// p_ready[h]      | 128 scores                              | values    | handover h is out: P of a block and what the
//                 |                                         |           | output has to be multiplied by before it, or,
//                 |                                         |           | behind a query's last block, what makes the
//                 |                                         |           | output the result
// p_free[h]       | 128 values                              | scores    | handover h may be written again
// tiles_read      | 128 scores, 128 values                  | both      | all keys are done with (split)
// named 2         | 128 producers                           | producers | valid entries of the query are counted
// cluster (split) | 256 consumers of each CTA               | all       | what the CTAs leave is out; then: it has been
//                 |                                         |           | read
//
// Buffers come round in one order: a query's Q, then its blocks. The scores warpgroup takes Q into registers and gives
// its buffer back, multiplies it by every block's keys and takes the softmax; the values warpgroup multiplies the
// block's values by P, and gives the block's buffer back, part by part. It follows the scores by handovers alone, which
// say of themselves whether they are a block or the end of a query, and skips the buffer that had Q.
//
// Products of scores go on under each softmax: those of the first parts of the next block are issued before it.
//
//   time | scores                          | values                         | producer
//   -----+---------------------------------+--------------------------------+------------------------------------
//    |   | S = Q K1: late parts            | O^T += V0^T P0^T, part by part | gather block 2 into the third
//    |   | S1 out of the accumulator       |                                |    buffer
//    |   | S = Q K2: early parts, issued   | free 0, part by part           | gather block 3 where block 0 was,
//    |   | maxima, exponentials,           |                                |    part by part
//    |   |    P1 -> smem                   |                                |
//    v   | S = Q K2: late parts ...        | O^T += V1^T P1^T ...           |
//  query | sums; lse; factors              | O^T times factors, transposed  | already brings in the next query's
//  ends  |    -> smem; next Q -> registers | in registers, -> global memory | Q and blocks
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/ring.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

template <int kDQk, int kHeads, bool kSplit>
struct alignas(1024) Storage<SmallHead<kDQk, kHeads, kSplit>> {
  using Config = SmallHead<kDQk, kHeads, kSplit>;
  static constexpr int kKeyBytes = Config::kBuffers * Config::kKeyTiles * Config::kTileBytes;

  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];  // of Q a tile has the first rows
  uint8_t p[Config::kHandovers][Config::kHeadTileBytes];               // [heads][entries], swizzled
  alignas(16) float factor[Config::kHandovers][kHeads];                // for the output: before P, or at the end
  // Of each scores warp, whether any of its factors is not 1; read as one word.
  alignas(4) bool moved[Config::kHandovers][4];
  bool is_end[Config::kHandovers];  // of a query
  alignas(16) uint32_t zeros[4];    // of the rows that are no heads

  // One bit per entry of a block; read as one word of 64 bits.
  alignas(8) uint16_t valid[Config::kBuffers][Config::kTileKeys / 16];
  int32_t blocks[Config::kBuffers];  // of the query whose Q is there
  int32_t counts[2][4];  // as where heads are many
  int32_t tokens[4][Config::kTileKeys / 4];

  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kBuffers][Config::kParts];
  Mbarrier p_ready[Config::kHandovers];
  Mbarrier p_free[Config::kHandovers];
  Mbarrier tiles_read;

  __device__ __forceinline__ void init() {
    constexpr uint32_t kEveryThread = Config::kWarpgroup;
    for (uint32_t& word : zeros) word = 0;
    tiles_read.init(kEveryThread * Config::kConsumers);
    for (int buffer = 0; buffer < Config::kBuffers; ++buffer) {
      for (int part = 0; part < Config::kParts; ++part) {
        full[buffer][part].init(kEveryThread + (part == Config::kParts - 1 ? 4 : 0));
        free[buffer][part].init(kEveryThread);
      }
    }
    for (int handover = 0; handover < Config::kHandovers; ++handover) {
      p_ready[handover].init(kEveryThread);
      p_free[handover].init(kEveryThread);
    }
    fence_mbarrier_init();
  }
};

// The buffer whose turn it is, as `RowGather::fill_places` wants it.
template <typename Config>
struct PipelineState {
  Ring<Config::kBuffers> ring;

  __device__ __forceinline__ int stage(int) const { return ring.stage; }
  static __device__ __forceinline__ constexpr int free_side(int part) { return part; }
  __device__ __forceinline__ uint32_t full_parity() const { return ring.full; }
  __device__ __forceinline__ uint32_t free_parity(int) const { return ring.free(); }

  // A column tile; the others of its part follow.
  __device__ __forceinline__ const uint8_t* tile(const Storage<Config>& storage, int, int tile) const {
    return storage.k[ring.stage][tile];
  }

  // Its address, for the copies.
  __device__ __forceinline__ uint32_t address(const Storage<Config>& storage, int part, int first) const {
    return smem_address(tile(storage, part, first));
  }

  __device__ __forceinline__ void advance() { ring.advance(); }
};

// Where a query is shared, which is a CTA's only one: until no consumer reads keys or P, as what they leave comes over
// them. Not a named barrier: the consumers come here at different places of the code.
template <typename Config>
__device__ __forceinline__ void meet_behind_tiles(Storage<Config>& storage) {
  storage.tiles_read.arrive();
  storage.tiles_read.wait(0);
}

static_assert(sizeof(Storage<SmallHead<576, 32, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<SmallHead<576, 16, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<SmallHead<512, 32, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<SmallHead<512, 16, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
