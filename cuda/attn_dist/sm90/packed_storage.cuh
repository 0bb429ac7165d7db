// Shared memory and barriers of the kernel for packed queries.
//
// barrier            | arrivals                                | who waits | what it says
// -------------------+-----------------------------------------+-----------+---------------------------------------
// full[b][part]      | 128 producers, behind their copies or   | consumers | these columns of the KV block, or of
//                    | with TMA's bytes; part 0 four more for  |           | four queries' Q, in buffer b are in
//                    | what comes with a block or a group      |           | (part 0: its `row_sets` or `query_group`)
// free[b][half]      | 256 consumers                           | producer  | this half of buffer b may be refilled
// order[c]           | 128 of the other consumer               | consumer  | the other consumer's products are issued:
//                    |                                         | c         | c may issue its next
// named 1            | 128 producers                           | producers | nobody reads the last query group, or its
//                    |                                         |           | `tokens`, any more
// named 2            | 128 producers                           | producers | the next query group is published
// named 3            | 128 producers                           | producers | `members` of all queries are there
// named 4            | 128 producers                           | producers | every warp has counted its rows
// named 5            | 128 producers                           | producers | `tokens` are there
//
// A query group is eight neighbouring queries. Through the ring of buffers go its Q, four queries in each of two
// buffers, then its rows in blocks of 64. Both consumers wait for every buffer and free it, so that no phase of a
// barrier goes unseen.
//
// `members`, `before`, `lse` and `query_group` have two sets, for even and odd query groups that have rows. The
// producer comes to a set again when it has gathered the rows of the query group between; for these consumers made room
// when they took in its Q, and before that they had written their rows of the query group before. `row_sets` have four,
// one for each step of the ring: by the time a producer writes that of step i + 4 it has filled the buffer of step i +
// 3, so every consumer has freed the whole of step i + 1, and had done with the block of step i before.
//
// Consumers multiply in turn, and have as many blocks, so each phase of order[c] is waited for once, but the last of
// the first consumer's.
//
//   time | consumer 0, a warp a query     | tensor cores      | consumer 1               | producer
//   -----+--------------------------------+-------------------+--------------------------+--------------------
//    |   | issue block i; left half done: | S = Q K(i), its Q | exponentials, sums of    | gather block i + 1
//    |   | free it; done: free the right  |                   | block i - 1              |
//    |   | exponentials, sums of block i  | S = Q K(i), its Q | issue block i; free left | right half of i + 1
//    v   |                                |                   | half, right half         | gather block i + 2
//  group | last block: sums; then from    |                   | the same                 | the next group: its
//   ends | places to entries, written     |                   |                          | members, tokens, Q
#pragma once

#include "../../common/barrier.cuh"
#include "../../common/math.cuh"
#include "packed_config.cuh"

namespace cupymla::attn_dist {

// Named barriers of the producer.
constexpr uint32_t kQueryGroupRead = 1;
constexpr uint32_t kQueryGroupPublished = 2;
constexpr uint32_t kMembersFound = 3;
constexpr uint32_t kRowsCounted = 4;
constexpr uint32_t kTokensListed = 5;

// Eight queries, as the producer's leader says it to all others.
struct QueryGroup {
  const uint8_t* kv;  // of the batch entry
  int32_t batch;
  int32_t first_query;  // negative: there are no more query groups
  uint32_t end;         // the step of the ring behind its last block
};

// Sixteen rows of a block, as a query sees them.
struct BlockRows {
  uint16_t rows;   // one bit for each that is the query's
  uint16_t first;  // the place of the first that is
};

// A step of the ring of two buffers, which a block or half of a query group's Q takes.
struct PipelineState {
  uint32_t count = 0;

  __device__ __forceinline__ int buffer() const { return static_cast<int>(count & 1u); }
  __device__ __forceinline__ uint32_t parity() const { return count >> 1 & 1u; }  // of full[buffer()]
  __device__ __forceinline__ int row_set() const { return static_cast<int>(count & 3u); }

  __device__ __forceinline__ PipelineState operator+(int steps) const { return {count + steps}; }
  __device__ __forceinline__ PipelineState operator-(int steps) const { return {count - steps}; }
};

template <typename Config>
struct alignas(1024) PackedStorage {
  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];

  // Of each query, one bit per token that it has a valid entry for; and how many bits are set before each word. A
  // token's place is how many of its query's tokens come before it.
  uint64_t members[2][Config::kQueries][Config::kWords];
  uint16_t before[2][Config::kQueries][Config::kWords];

  // The rows of the present query group: tokens that any of its queries has, in order. This and what follows up to
  // `lse` is the producer's.
  uint16_t tokens[Config::kMaxTokens];
  uint32_t warp_rows[4];  // how many of them each producer warp lists
  uint32_t rows;          // all of them
  uint32_t index;         // of the CTA's next query group, over all batch entries
  uint32_t query_groups;  // before the present one that had rows

  Log2Lse lse[2][Config::kWarps][16];
  float* row[Config::kWarps];  // of the distribution

  static constexpr int kRowSets = 4;
  BlockRows row_sets[kRowSets][Config::kQueries][4];  // the last number is the producer warp's that gathers the rows

  uint16_t valid[Config::kBuffers][4];  // rows that a block has; only the gather writes them, nobody reads them
  QueryGroup query_group[2];

  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kBuffers][2];
  Mbarrier order[Config::kConsumers];
};

static_assert(sizeof(PackedStorage<PackedConfig<576>>) <= 227 * 1024);

}  // namespace cupymla::attn_dist
