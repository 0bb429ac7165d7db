// Shared memory and barriers where heads are many; small_head_storage.cuh has those where they are few.
//
// barrier            | arrivals                                | who waits     | what it says
// -------------------+-----------------------------------------+---------------+--------------------------------------
// q_full             | 1 + bytes (TMA)                         | consumers     | Q is in, number of blocks is out
// q_free             | 256 consumers                           | producer      | all scores of the query are done
// full[b][part]      | 128 copy arrivals; last part 4 more for | owner of b,   | these columns of the block in buffer b
//                    | the validity words                      | then by chain | (and, last part, its validity) are in
// free[b][left]      | 128 consumer 0                          | producer      | left half of buffer b may be refilled
// free[b][right]     | 128 consumer 1                          | producer      | the rest of buffer b, probabilities
//                    |                                         |               | kept in it included, may be refilled
// base_ready         | 128 consumer 0                          | consumer 1    | base of consumer 0's block is out
// p_ready[w]         | 128 consumer w                          | the other     | P of w's block is out, and its base
// statistics_ready[w]| 128 consumer w                          | the other     | row statistics of w are out
// named 1            | 128 consumer 0                          | consumer 0    | all its warps have read their keys
// named 2            | 128 producers                           | producers     | valid entries of the query are counted
//
// Every thread arrives for itself. One lane for its warp, behind a __syncwarp, was 3% slower (2026-11-21, H200).
//
// Consumer w owns block i with i % 2 == w: it multiplies Q by the block's keys and takes the softmax. Both consumers
// multiply every block's P by their half of the value columns, in block order, so the base that exponentials are taken
// relative to is one sequence. What the consumers hand each other needs no "free" side, because nobody writes it again,
// or arrives again, before the other has taken it: consumer 0's base after it has P of consumer 1's last block, which
// comes after consumer 1 has read the base; P of either after its key buffer was refilled, which comes after both have
// multiplied by it. Row statistics have two sets; see there.
//
//   time | consumer 0 (left columns)      | consumer 1 (right columns)     | producer
//   -----+--------------------------------+--------------------------------+----------------------------
//    |   | S0 = Q K0                      | S1 = Q K1                      | (buffers 0, 1 in use)
//    |   | maxima, base -> smem           |    ... maxima                  |
//    |   | exponentials, P0 -> smem       | base 0; exponentials, P1 -> smem|
//    |   | O += P0 V0 left (P registers)  | O += P0 V0 right (P smem)      |
//    |   | free 0 left                    | free 0 right                   | gather block 2 into 0
//    |   | O += P1 V1 left (P smem)       | O += P1 V1 right (P registers) |    ...
//    v   | free 1 left                    | free 1 right                   | gather block 3 into 1
//  query | row statistics exchanged, O from registers to global memory     | already gathers the next query's
//  ends  | (nothing of the next query waits for this)                      | Q and blocks 0, 1
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr uint32_t kKeysRead = 1, kCounted = 2;  // named barriers
constexpr uint32_t kOwnConverted = 3;            // and one more: sparse_mla_decode/sm90/own_share.cuh
constexpr int kSharedMemoryLimit = 227 * 1024;

template <typename Config>
struct alignas(1024) Storage {
  uint8_t q[Config::kKeyTiles][Config::kTileBytes];
  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];
  // P of the blocks that do not find room in a key tile: see `probabilities`.
  static constexpr bool kHasRopeTile = Config::kKeyTiles > Config::kValueTiles;
  uint8_t p[kHasRopeTile ? 1 : 2][Config::kTileBytes];

  float base[Config::kConsumers][Config::kHeads];
  // Two sets, for even and odd queries: either consumer may write the next query's before the other has read this
  // one's, but not those after that, which come after the next exchange.
  float row_max[2][Config::kConsumers][Config::kHeads];
  float row_sum[2][Config::kConsumers][Config::kHeads];
  bool occupied[2][Config::kConsumers];
  // One bit per entry of a block; a consumer reads a buffer's four words as one of 64 bits.
  alignas(8) uint16_t valid[Config::kBuffers][Config::kTileKeys / 16];

  int32_t blocks;  // of this query, for the consumers
  // Valid entries that each producer warp counted; two sets, as a warp may count for the next query while another still
  // adds up this one's.
  int32_t counts[2][4];
  int32_t tokens[4][Config::kTileKeys / 4];  // of the warps' next entries, where valid entries have gaps between them

  Mbarrier q_full;
  Mbarrier q_free;
  Mbarrier full[Config::kBuffers][Config::kParts];
  typename Config::FreeBarrier free[Config::kBuffers][2];
  Mbarrier base_ready;
  Mbarrier p_ready[Config::kConsumers];
  Mbarrier statistics_ready[Config::kConsumers];
  Mbarrier codes_in[Config::kBuffers];  // where consumers convert

  __device__ __forceinline__ void init() {
    constexpr uint32_t kEveryThread = Config::kWarpgroup;
    if constexpr (Config::kConsumersConvert) {
      for (Mbarrier& barrier : codes_in) barrier.init(2 * kEveryThread);
    }
    q_full.init(1);
    q_free.init(kEveryThread * Config::kConsumers);
    base_ready.init(kEveryThread);
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      p_ready[consumer].init(kEveryThread);
      statistics_ready[consumer].init(kEveryThread);
    }
    for (int buffer = 0; buffer < Config::kBuffers; ++buffer) {
      for (int part = 0; part < Config::kParts; ++part) {
        full[buffer][part].init(kEveryThread + (part == Config::kParts - 1 ? 4 : 0));
      }
      free[buffer][0].init(kEveryThread * Config::kSharers);
      free[buffer][1].init(kEveryThread * Config::kSharers);
    }
    fence_mbarrier_init();
  }

  // Where P of the blocks in `buffer` goes. Buffer 0's RoPE tile is no value column and is dead once S0 is done, so P0
  // takes its place; it is refilled only after consumer 1 has freed the right half, having read P0.
  __device__ __forceinline__ uint8_t* probabilities(int buffer) {
    if constexpr (kHasRopeTile) return buffer == 0 ? k[0][Config::kValueTiles] : p[0];
    return p[buffer];
  }
};

static_assert(sizeof(Storage<ManyHeads<576>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<ManyHeads<512>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
