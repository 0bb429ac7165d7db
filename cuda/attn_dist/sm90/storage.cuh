// Shared memory and barriers of the kernel.
//
// barrier            | arrivals                                | who waits | what it says
// -------------------+-----------------------------------------+-----------+---------------------------------------
// full[b][part]      | 128 producers, behind their copies or   | consumers | these columns of the KV block, or of
//                    | with TMA's bytes; part 0 four more for  |           | 64 heads of Q, in buffer b are in
//                    | the validity words                      |           | (part 0: and its validity or pass)
// free[b][half]      | 256 consumers                           | producer  | this half of buffer b may be refilled
// sums_ready         | 256 consumers                           | consumers | every warp's sums over its heads are
//                    |                                         |           | out (or its share of a row sum)
// order[c]           | 128 of the other consumer               | consumer  | the other consumer's products are issued:
//                    |                                         | c         | c may issue its next (128 heads only)
// named 1, 2         | 128 producers                           | producers | the walk has been read; has been changed
//
// Buffers are used in a ring: for each pass 64 or 128 heads of Q go through it, one buffer for 64, then the pass's KV
// blocks. Both consumers wait for every buffer and free it, so that no phase of a barrier goes unseen.
//
// A pass is described in one of four places, used in turn: by the time a place is used again, Q of two passes in
// between has gone through the ring.
//
// Sums have two sets, used in turn. Before a warp writes its sums of round n, it has waited for round n - 1; whoever
// adds up round n - 2 has done so before arriving for round n - 1. So one barrier is enough, and no set needs a "free"
// side.
//
// Consumers multiply in turn where products bind: one has its exponentials while the other multiplies. Both have as
// many blocks, so each phase of order[c] is waited for once, but the last of the first consumer's.
//
//   time | consumers (both)                     | tensor cores         | producer
//   -----+--------------------------------------+----------------------+------------------------------
//    |   | exponentials, sums of block i - 1    | S = Q K(i)           | gather block i + 2
//    |   | half of block i done: free left      |                      |
//    |   | issue block i + 1                    |                      | gather block i + 3, left half
//    |   | block i done: free right             | S' = Q K(i + 1)      | right half
//    |   | exponentials, sums of block i        |                      |
//    v   | add up and write block i - 1         |                      |
//   pass | last block done: Q of the next pass  | (the other           | next pass: Q, then blocks, as
//   ends | into registers                       |  consumer's)         | soon as buffers are free
//        | issue its block 0                    | S = Q K(0)           |
//        | exponentials, sums of the last block |                      |
//        | add up and write the last two        |                      |
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/log2_lse.cuh"
#include "config.cuh"
#include "place.cuh"
#include "walk.cuh"

namespace cupymla::attn_dist {

// Named barriers.
constexpr uint32_t kWalkRead = 1;
constexpr uint32_t kWalkMoved = 2;

// What the producer tells consumers of a pass.
struct Pass {
  float* dist;         // of the query
  const float* lse;    // of head 0 of the query
  int32_t first_head;  // negative: there are no more passes
  int32_t begin_block, end_block;  // that hold the slots that can be valid
  int32_t row_end_block;           // blocks from end_block to this one get zeros
};

template <typename Config>
struct alignas(1024) Storage {
  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];

  float sums[2][Config::kPartialSums][Config::kSlots];
  float mass[Config::kWarps][32];  // what each thread has written to a row that is to be normalised

  Log2Lse lse[2][Config::kWarps][16];  // for even and odd passes

  // One bit per slot of a block.
  uint16_t valid[Config::kBuffers][Config::kSlots / 16];

  static constexpr int kPasses = 4;
  Pass pass[kPasses];
  Walk<Config> walk;  // the producer's; here to spare registers

  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kBuffers][2];
  Mbarrier sums_ready;
  Mbarrier order[Config::kConsumers];  // where kInOrder
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576, 128>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512, 128>>) <= kSharedMemoryLimit);

}  // namespace cupymla::attn_dist
