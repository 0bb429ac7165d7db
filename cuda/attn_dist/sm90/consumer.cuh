// A consumer warpgroup: scores of its heads on its slots of each block, block after block, pass after pass.
#pragma once

#include "../../common/opaque.cuh"
#include "products.cuh"
#include "storage.cuh"
#include "sums.cuh"

namespace cupymla::attn_dist {

template <typename Config, typename Element>
struct Consumer {
  static constexpr int kScores = Products<Config, Element>::kScores;

  // A block whose products are in flight.
  struct Block {
    uint32_t pass;
    int32_t index;   // in its row
    uint32_t valid;  // bits 0 and 1: this lane's two slots, bit 2: any of this consumer's
  };

  Storage<Config>& storage;
  const Parameters& params;
  Place<Config> place;      // the next in the ring
  Block present{0, 0, 0};   // its pass is the last that was begun
  Products<Config, Element> products;
  Sums<Config> sums;

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params, int who)
      : storage(storage),
        params(params),
        place{0, who == 0 ? 2u : 0u},
        sums{storage, params, who * 4 + static_cast<int>(threadIdx.x / 32 % 4), static_cast<int>(threadIdx.x % 32)} {}

  __device__ __forceinline__ void run() {
    // Two sets of scores, so that the next block's products run under this one's exponentials.
    float even[kScores], odd[kScores];
    if (!begin_pass()) return;
    issue(even);
    while (advance(even, odd) && advance(odd, even)) {
    }
  }

  // A pass by its number, from 1; it lives in shared memory, to spare registers.
  __device__ __forceinline__ const Pass& pass(uint32_t number) const {
    return storage.pass[(number - 1) % Storage<Config>::kPasses];
  }

  __device__ __forceinline__ int who() const { return sums.warp / 4; }

  // This warp's first head, less the pass's.
  __device__ __forceinline__ int32_t warp_head() const { return sums.warp % (Config::kHeads / 16) * 16; }

  // This consumer's barrier, or the other's.
  __device__ __forceinline__ Mbarrier& order(int other) {
    int own = sums.warp;
    make_opaque(own);  // or its address would take a register all the time
    return storage.order[own / 4 ^ other];
  }

  // The first column of a block that this consumer multiplies.
  __device__ __forceinline__ int first_column() const {
    return Config::kQueryBlocks == 1 ? who() * Config::kColumns : 0;
  }

  // Takes in Q of the next pass; false when there is none.
  __device__ __forceinline__ bool begin_pass() {
    storage.full[place.buffer][0].wait(place.parity());
    const Pass& next = pass(++present.pass);
    if (next.first_head < 0) return false;
    const float lse = sums.read_lse(next, next.first_head + warp_head());
    if (next.first_head == 0) sums.clear_rest(next);
    present.index = next.begin_block;
    for (int part = 0; part < Config::kQueryBlocks; ++part) {
#pragma unroll
      for (int arrival = 0; arrival < Config::kParts; ++arrival) {
        storage.full[place.buffer][arrival].wait(place.parity());
      }
      if (Config::kQueryBlocks == 1 || part == who()) products.load(storage.k[place.buffer][0], sums.warp, sums.lane);
      free_half(place.buffer, 0);
      free_half(place.buffer, 1);
      place.advance();
    }
    sums.keep_lse(lse, present.pass);
    return true;
  }

  __device__ __forceinline__ void free_half(int which, int half) { storage.free[which][half].arrive(); }

  // Issues scores = Q K^T of the block in the next buffer.
  __device__ __forceinline__ void issue(float (&scores)[kScores]) {
    auto& full = storage.full[place.buffer];
    full[0].wait(place.parity());
    const int column = first_column() + sums.heads.column();
    const uint32_t slots = storage.valid[place.buffer][column / 16] >> column % 16 & 3u;
    present.valid = slots | (__any_sync(0xffffffffu, slots != 0) ? 4u : 0u);

    // In turn with the other consumer, or both would multiply at once and then both have exponentials. A fresh mbarrier
    // counts as having completed the phase before its first, so the first consumer may begin.
    if (Config::kInOrder) order(0).wait(place.order());
    products.issue(scores, storage.k[place.buffer][0], first_column(), full, place.parity(), [](int) {});
    if (Config::kInOrder) {
      order(1).arrive();
      place.advance_order();
    }
    place.advance();
  }

  // Scores of the present block are in flight. Issues those of the next block, which after the last one is that of the
  // next pass, and finishes this one; false when there is no next.
  __device__ __forceinline__ bool advance(float (&scores)[kScores], float (&upcoming)[kScores]) {
    sm90::wgmma_wait<Config::kParts - Config::kLeftParts>();
    free_half(place.before(1), 0);
    const Block done = present;
    const bool last = done.index + 1 == pass(done.pass).end_block;
    if (last) {
      // Q is about to be replaced, so nothing may be in flight that reads it.
      sm90::wgmma_wait<0>();
      free_half(place.before(1), 1);
      if (!begin_pass()) {
        sm90::pin_registers(scores);
        finish(scores, done, true);
        return false;
      }
    } else {
      ++present.index;
    }
    issue(upcoming);
    sm90::wgmma_wait<Config::kParts>();
    if (!last) free_half(place.before(2), 1);
    sm90::pin_registers(scores);
    finish(scores, done, last);
    return true;
  }

  // Gives out a block's sums over heads, and writes to the row those of the block before, whose addends have come in
  // meanwhile; after the last block of a pass both.
  __device__ __forceinline__ void finish(float (&scores)[kScores], const Block& done, bool last) {
    float column_sums[2] = {0.f, 0.f};
    const Pass& own = pass(done.pass);
    const int32_t heads = params.h_q - own.first_head - warp_head();
    if ((done.valid & 4u) != 0 && heads > 0) {
      sums.sum_heads(scores, heads, done.pass, column_sums);
      if ((done.valid & 1u) == 0) column_sums[0] = 0.f;
      if ((done.valid & 2u) == 0) column_sums[1] = 0.f;
    }
    if (done.index != own.begin_block) {
      sums.wait();
      sums.add_up(own, done.index - 1);
    }
    sums.publish(column_sums, first_column());
    if (!last) return;
    sums.wait();
    sums.add_up(own, done.index);
    if (sums.normalizes(own)) sums.divide(own);
  }
};

}  // namespace cupymla::attn_dist
