// Shared memory and barriers of the kernel.
//
// barrier            | arrivals                                | who waits     | what it says
// -------------------+-----------------------------------------+---------------+--------------------------------------
// q_full             | 1 + bytes (TMA)                         | consumers     | Q is in
// full[b][part]      | 128 copy arrivals; last part 4 more for | owner of b,   | these columns of the block in buffer b
//                    | the validity words                      | then by chain | (and, last part, its validity) are in
// free[b][left]      | 4, warps of consumer 0                  | producer      | left half of buffer b may be refilled
// free[b][right]     | 4, warps of consumer 1                  | producer      | the rest of buffer b, probabilities
//                    |                                         |               | kept in it included, may be refilled
// named 1 + w        | 128 of consumer w                       | itself        | all its warps have read their keys
// named 3 + w        | 128 arrive (w), 128 sync (the other)    | other consumer| P and row maxima of w's block are out
// named 5            | 256 consumers                           | consumers     | row sums are out
//
// Consumer w owns block i with i % 2 == w: it multiplies Q by the block's keys and takes the softmax. Both consumers
// multiply every block's P by their half of the value columns, in block order, so the running maximum is one sequence.
//
//   time | consumer 0 (left columns)          | consumer 1 (right columns)         | producer
//   -----+------------------------------------+------------------------------------+-------------------------
//    |   | S0 = Q K0                          | S1 = Q K1                          | (buffers 0, 1 in use)
//    |   | softmax 0 -> P0 to registers, smem |    ... S1                          |
//    |   | O += P0 V0 left                    | O += P0 V0 right                   |
//    |   |    ...                             | softmax 1 under it                 |
//    |   | free 0 left                        | free 0 right                       | gather block 2 into 0
//    |   | O += P1 V1 left                    | O += P1 V1 right                   |    ...
//    v   | free 1 left                        | free 1 right                       | gather block 3 into 1
//  drain | last P V, row sums exchanged, O through shared memory to global          | done after its last block
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::sparse_mla_fwd {

enum NamedBarrier : uint32_t { kKeysRead = 1, kProbabilitiesReady = 3, kRowSumsReady = 5 };

template <typename Config>
struct alignas(1024) Storage {
  // Q during the loop; the output on its way out after it.
  uint8_t q[Config::kKeyTiles][Config::kTileBytes];
  uint8_t k[Config::kBuffers][Config::kKeyTiles][Config::kTileBytes];
  // P of the blocks that do not find room in a key tile: see `probabilities`.
  static constexpr bool kHasRopeTile = Config::kKeyTiles > Config::kValueTiles;
  uint8_t p[kHasRopeTile ? 1 : 2][Config::kTileBytes];

  float row_max[Config::kConsumers][Config::kHeads];
  float row_sum[Config::kConsumers][Config::kHeads];
  uint16_t valid[Config::kBuffers][Config::kSlots / 16];

  Mbarrier q_full;
  Mbarrier full[Config::kBuffers][Config::kParts];
  Mbarrier free[Config::kBuffers][2];

  // Where P of the blocks in `buffer` goes. Buffer 0's RoPE tile is no value column and is dead once S0 is done, so P0
  // takes its place; it is refilled only after consumer 1 has freed the right half, having read P0.
  __device__ __forceinline__ uint8_t* probabilities(int buffer) {
    if constexpr (kHasRopeTile) return buffer == 0 ? k[0][Config::kValueTiles] : p[0];
    return p[buffer];
  }
};

constexpr int kSharedMemoryLimit = 227 * 1024;
static_assert(sizeof(Storage<Config<576>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<Config<512>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
