// Shared memory and barriers of the kernel.
//
// barrier            | arrivals                                | who waits | what it says
// -------------------+-----------------------------------------+-----------+---------------------------------------
// full[b][0]         | 128 producers, behind their copies or   | consumers | the KV block, or 64 heads of Q, in
//                    | with TMA's bytes; four more for the     |           | buffer b is in, and its validity or
//                    | validity words                          |           | the description of the head block
// free[b][0]         | 256 consumers                           | producer  | buffer b may be refilled
// sums_ready[g]      | 256 consumers; 128 of consumer g where  | those     | sums over the heads of all these warps
//                    | there are up to 64 heads                |           | are out (of 128 heads: or their shares
//                    |                                         |           | of a row sum)
// masses_ready       | 256 consumers, up to 64 heads only      | consumers | every warp's share of a row sum is out
// order[c]           | 128 of the other consumer               | consumer  | the other consumer's products are all but
//                    |                                         | c         | issued: c may issue its next (128 heads
//                    |                                         |           | only)
// named 1, 2         | 128 producers                           | producers | the iterator has been read; is changed
//
// Buffers are used in a ring: for each head block 64 or 128 heads of Q go through it, one buffer for 64, then the head
// block's KV blocks. Both consumers wait for every buffer and free it, also with up to 64 heads, where each multiplies
// every second block alone: so no phase of a barrier goes unseen. Who does not multiply a block lets go of it long
// before the other.
//
// A head block is described in one of four places, used in turn. A consumer needs it until it has a block of the next
// head block (of which, with up to 64 heads, it may have none: until that one ends), so until it takes in Q of the head
// block after that, at the latest. By the time a place is used again, Q of two head blocks in between has gone through
// the ring.
//
// Sums have two sets, used in turn. Before a warp writes its sums of round n, it has waited for round n - 1; whoever
// adds up round n - 2 has done so before arriving for round n - 1. So one barrier is enough, and no set needs a "free"
// side. Shares of row sums have two sets where consumers are not held together by sums_ready: one may be at the row
// after the next only when the other has read the first one's.
//
// With 128 heads consumers multiply in turn: one has its exponentials while the other multiplies. Both have as many
// blocks, so each phase of order[c] is waited for once, but the last of the first consumer's.
//
//   128  | consumer 0                        | tensor cores     | consumer 1           | producer
//   -----+-----------------------------------+------------------+----------------------+---------------------
//    |   | issue block i                     | S = Q K(i)       | exponentials, sums   | gather block i + 1,
//    |   | add up and write block i - 1      |                  | of block i - 1       | i + 2
//    |   | done: let go of i; exponentials,  | S = Q K(i), its  | issue block i; add   |
//    v   | sums of block i                   | Q                | up and write i - 1   | gather block i + 3
//   next | Q of the next head block into registers; issue its block 0; then the last sums are   | next head block:
//   head | added up, and the row is divided                                                     | Q, then KV
//
//   64   | consumer 0                        | consumer 1                      | producer
//   -----+-----------------------------------+---------------------------------+-----------------------------
//    |   | issue block i; add up and write   | exponentials, sums of i - 1     | gather block i + 1
//    |   | i - 2; done: let go of i          | let go of i                     |
//    |   | exponentials, sums of block i     | issue block i + 1; add up and   | gather block i + 2
//    v   | let go of i + 1                   | write i - 1; done: let go of it |
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/math.cuh"
#include "config.cuh"
#include "pipeline_state.cuh"
#include "tile_iterator.cuh"

namespace cupymla::attn_dist {

// Named barriers.
constexpr uint32_t kIteratorRead = 1;
constexpr uint32_t kIteratorMoved = 2;

// What the producer tells consumers of a head block.
struct HeadBlock {
  float* dist;         // of the query
  const float* lse;    // of head 0 of the query
  int32_t first_head;  // negative: there are no more head blocks
  int32_t begin_block, end_block;  // that hold the entries that can be valid
  int32_t row_end_block;           // blocks from end_block to this one get zeros
};

template <typename Config>
struct alignas(1024) Storage {
  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];

  float sums[Config::kSumGroups][2][Config::kPartialSums][Config::kTileKeys];
  float mass[2][Config::kWarps][32];  // what each thread has written to a row that is to be normalised

  Log2Lse lse[Config::kWarps][16];

  // One bit per entry of a block.
  uint16_t valid[Config::kBuffers][Config::kTileKeys / 16];

  static constexpr int kHeadBlocks = 4;
  HeadBlock head_block[kHeadBlocks];
  TileIterator<Config> iterator;  // the producer's; here to spare registers

  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kBuffers][1];
  Mbarrier sums_ready[Config::kSumGroups];
  Mbarrier masses_ready;
  Mbarrier order[Config::kConsumers];  // not where kAlternate
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576, 128>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512, 128>>) <= kSharedMemoryLimit);

}  // namespace cupymla::attn_dist
