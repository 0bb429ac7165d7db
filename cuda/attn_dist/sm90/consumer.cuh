// A consumer warpgroup: scores of its heads on its blocks, block after block, pass after pass, and their sums over
// heads. Of 65 to 128 heads it has 64 and takes all blocks, in turn with the other consumer. Of up to 64 it has all and
// takes every second block of a row: it has two blocks' time for one, and sums need no warp of the other consumer.
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
  const int who;
  Place<Config> place;   // the next in the ring
  uint32_t passes = 0;   // begun so far
  uint32_t turns = 0;    // own blocks so far
  // What the other warps' sums are awaited for, which is done while the next block is multiplied: the own block whose
  // sums are given out, but not in the row yet; and the pass that has ended, 0 for none, if it is not the present one.
  int32_t waiting = kNone;
  uint32_t ended = 0;
  TheseProducts products;
  Sums<Config> sums;

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params, int who)
      : storage(storage),
        params(params),
        who(who),
        sums{storage, params, who * 4 + static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)} {}

  __device__ __forceinline__ void run() {
    while (begin_pass()) {
      for (int32_t block = pass(passes).begin_block; block < pass(passes).end_block; ++block) {
        storage.full[place.buffer][0].wait(place.parity);
        if (!Config::kAlternate || block % Config::kConsumers == who) {
          take(block);
        } else {
          free();  // the other's, waited for and let go of so that no phase of a barrier goes unseen
        }
        place.advance();
      }
      if (ended != 0) finish_waiting();  // no block of this pass was its own
      ended = passes;
    }
    finish_waiting();
  }

  // A pass by its number, from 1; it lives in shared memory.
  __device__ __forceinline__ const Pass& pass(uint32_t number) const {
    return storage.pass[(number - 1) % Storage<Config>::kPasses];
  }

  // This warp's first head, less the pass's.
  __device__ __forceinline__ int32_t warp_head() const { return sums.warp % (Config::kHeads / 16) * 16; }

  // Takes in Q of the next pass; false when there is none.
  __device__ __forceinline__ bool begin_pass() {
    storage.full[place.buffer][0].wait(place.parity);
    const Pass& next = pass(passes + 1);
    if (next.first_head < 0) return false;
    ++passes;
    const float lse = sums.read_lse(next, next.first_head + warp_head());
    if (next.first_head == 0) sums.clear_rest(next);
    for (int part = 0; part < Config::kQueryBlocks; ++part) {
      if (part != 0) storage.full[place.buffer][0].wait(place.parity);
      if (Config::kAlternate || part == who) products.load(storage.k[place.buffer][0], sums.warp, sums.lane);
      free();
      place.advance();
    }
    sums.keep_lse(lse);
    return true;
  }

  __device__ __forceinline__ void free() const { storage.free[place.buffer][0].arrive(); }

  // Scores of an own block, which is there, and their sums over heads. One set of scores: while this consumer has its
  // exponentials, the tensor cores multiply for the other one, or wait for the gather.
  __device__ __forceinline__ void take(int32_t block) {
    const int column = sums.heads.column();
    // Bits 0 and 1: this lane's two slots.
    const uint32_t slots = storage.valid[place.buffer][column / 16] >> column % 16 & 3u;
    const bool occupied = __any_sync(0xffffffffu, slots != 0);
    const uint64_t keys = TheseProducts::descriptor(storage.k[place.buffer][0]);
    // What takes long and needs no tensor cores comes before the turn.
    fence_async_shared();
    float scores[kScores];
    // A fresh mbarrier counts as having completed the phase before its first: the first consumer may begin.
    if (!Config::kAlternate) storage.order[who].wait((turns ^ (who == 0 ? 1u : 0u)) & 1u);
    products.issue(scores, keys, [&](int tile) {
      if (!Config::kAlternate && tile == Config::kTurnTile) storage.order[1 - who].arrive();
    });
    ++turns;
    finish_waiting();
    const int32_t heads = params.h_q - pass(passes).first_head - warp_head();
    sm90::wgmma_wait<0>();
    free();
    sm90::pin_registers(scores);

    float column_sums[2] = {0.f, 0.f};
    if (heads > 0 && occupied) {
      sums.sum_heads(scores, heads, column_sums);
      if ((slots & 1u) == 0) column_sums[0] = 0.f;
      if ((slots & 2u) == 0) column_sums[1] = 0.f;
    }
    sums.publish(column_sums);
    waiting = block;
  }

  // Writes the sums of the own block before to the row, and divides it if its pass was the last.
  __device__ __forceinline__ void finish_waiting() {
    const Pass& own = pass(ended != 0 ? ended : passes);
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
