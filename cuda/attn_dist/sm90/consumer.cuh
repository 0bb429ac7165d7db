// A consumer warpgroup: scores of its heads on its blocks, block after block, head block after head block, and their
// sums over heads. Of 65 to 128 heads it has 64 and takes all blocks, in turn with the other consumer. Of up to 64 it
// has all and takes every second block of a row: it has two blocks' time for one, and sums need no warp of the other
// consumer.
#pragma once

#include "products.cuh"
#include "storage.cuh"
#include "sums.cuh"

namespace cupymla::attn_dist {

template <typename Config, typename Element>
struct Consumer {
  using TheseProducts = Products<Config, Element>;
  static constexpr int kScores = TheseProducts::kScores;
  static constexpr int32_t kNone = -1;

  Storage<Config>& storage;
  const Parameters& params;
  const int warpgroup_idx;
  PipelineState<Config> state;  // the next in the ring
  uint32_t head_blocks = 0;  // begun so far
  uint32_t own_blocks = 0;  // own blocks so far
  // What the other warps' sums are awaited for, which is done while the next block is multiplied: the own block whose
  // sums are given out, but not in the row yet; and the head block that has ended, 0 for none, if it is not the present
  // one.
  int32_t waiting = kNone;
  uint32_t ended = 0;
  TheseProducts products;
  Sums<Config> sums;

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage),
        params(params),
        warpgroup_idx(warpgroup_idx),
        sums{storage, params, warpgroup_idx * 4 + static_cast<int>(threadIdx.x / 32 % 4),
             static_cast<int>(threadIdx.x % 32)} {}

  __device__ __forceinline__ void run() {
    while (begin_head_block()) {
      for (int32_t block = head_block(head_blocks).begin_block; block < head_block(head_blocks).end_block; ++block) {
        storage.full[state.buffer][0].wait(state.parity);
        if (!Config::kAlternate || block % Config::kConsumers == warpgroup_idx) {
          take(block);
        } else {
          free();  // the other's, waited for and let go of so that no phase of a barrier goes unseen
        }
        state.advance();
      }
      if (ended != 0) finish_waiting();  // no KV block of this one was its own
      ended = head_blocks;
    }
    finish_waiting();
  }

  // A head block by its number, from 1; it lives in shared memory.
  __device__ __forceinline__ const HeadBlock& head_block(uint32_t number) const {
    return storage.head_block[(number - 1) % Storage<Config>::kHeadBlocks];
  }

  // This warp's first head, less the head block's.
  __device__ __forceinline__ int32_t warp_head() const { return sums.warp % (Config::kHeads / 16) * 16; }

  // Takes in Q of the next head block; false when there is none.
  __device__ __forceinline__ bool begin_head_block() {
    storage.full[state.buffer][0].wait(state.parity);
    const HeadBlock& next = head_block(head_blocks + 1);
    if (next.first_head < 0) return false;
    ++head_blocks;
    const float lse = sums.read_lse(next, next.first_head + warp_head());
    if (next.first_head == 0) sums.clear_rest(next);
    for (int part = 0; part < Config::kQueryBlocks; ++part) {
      if (part != 0) storage.full[state.buffer][0].wait(state.parity);
      if (Config::kAlternate || part == warpgroup_idx) products.load(storage.k[state.buffer][0], sums.warp, sums.lane);
      free();
      state.advance();
    }
    sums.keep_lse(lse);
    return true;
  }

  __device__ __forceinline__ void free() const { storage.free[state.buffer][0].arrive(); }

  // Scores of an own block, which is there, and their sums over heads. One set of scores: while this consumer has its
  // exponentials, the tensor cores multiply for the other one, or wait for the gather.
  __device__ __forceinline__ void take(int32_t block) {
    const int column = sums.heads.column();
    // Bits 0 and 1: this lane's two entries.
    const uint32_t entries = storage.valid[state.buffer][column / 16] >> column % 16 & 3u;
    const bool occupied = __any_sync(0xffffffffu, entries != 0);
    const uint64_t keys = TheseProducts::descriptor(storage.k[state.buffer][0]);
    // What takes long and needs no tensor cores comes before the turn.
    fence_async_shared();
    float scores[kScores];
    // A fresh mbarrier counts as having completed the phase before its first: the first consumer may begin.
    if (!Config::kAlternate) storage.order[warpgroup_idx].wait((own_blocks ^ (warpgroup_idx == 0 ? 1u : 0u)) & 1u);
    products.issue(scores, keys, [&](int tile) {
      if (!Config::kAlternate && tile == Config::kOrderTile) storage.order[1 - warpgroup_idx].arrive();
    });
    ++own_blocks;
    finish_waiting();
    const int32_t heads = params.h_q - head_block(head_blocks).first_head - warp_head();
    sm90::wgmma_wait<0>();
    free();
    sm90::warpgroup_fence_operand(scores);

    float column_sums[2] = {0.f, 0.f};
    if (heads > 0 && occupied) {
      sums.sum_heads(scores, heads, column_sums);
      if ((entries & 1u) == 0) column_sums[0] = 0.f;
      if ((entries & 2u) == 0) column_sums[1] = 0.f;
    }
    sums.publish(column_sums);
    waiting = block;
  }

  // Writes the sums of the own block before to the row, and divides it if its head block was the last.
  __device__ __forceinline__ void finish_waiting() {
    const HeadBlock& own = head_block(ended != 0 ? ended : head_blocks);
    if (waiting != kNone) {
      sums.wait();
      sums.add_up(own, waiting);
      waiting = kNone;
    }
    if (ended == 0) return;
    if (sums.normalizes(own)) sums.divide(own);
    ended = 0;
  }
};

}  // namespace cupymla::attn_dist
