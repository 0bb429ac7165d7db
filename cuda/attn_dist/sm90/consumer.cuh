// A consumer warpgroup: scores of its heads on its slots of each block, block after block, pass after pass.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "storage.cuh"
#include "sums.cuh"

namespace cupymla::attn_dist {

// Products of 64 heads, in registers, with `kColumns` keys.
template <typename Element, int kColumns>
struct Atom;
template <>
struct Atom<__nv_bfloat16, 64> : cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__nv_bfloat16, 32> : cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__half, 64> : cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__half, 32> : cute::SM90::GMMA::MMA_64x32x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K> {};

template <typename Config, typename Element>
struct Consumer {
  static constexpr int kScores = Config::kConsumerHeads * Config::kColumns / Config::kWarpgroup;
  static constexpr int kSteps = Config::kDQk / 16;

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
  uint32_t q[kSteps][4];  // this thread's fragments of 64 heads
  Sums<Config> sums;

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params, int who)
      : storage(storage),
        params(params),
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

  // The first column of a block that this consumer multiplies.
  __device__ __forceinline__ int first_column() const {
    return Config::kQueryBlocks == 1 ? who() * Config::kColumns : 0;
  }

  // Takes in Q of the next pass; false when there is none.
  __device__ __forceinline__ bool begin_pass() {
    storage.full[place.buffer][0].wait(place.parity);
    const Pass& next = pass(++present.pass);
    if (next.first_head < 0) return false;
    const float lse = sums.read_lse(next, next.first_head + warp_head());
    if (next.first_head == 0) sums.clear_rest(next);
    present.index = next.begin_block;
    for (int part = 0; part < Config::kQueryBlocks; ++part) {
#pragma unroll
      for (int arrival = 0; arrival < Config::kParts; ++arrival) {
        storage.full[place.buffer][arrival].wait(place.parity);
      }
      if (Config::kQueryBlocks == 1 || part == who()) load_heads();
      free_half(place.buffer, 0);
      free_half(place.buffer, 1);
      place.advance();
    }
    sums.keep_lse(lse, present.pass);
    return true;
  }

  __device__ __forceinline__ void load_heads() {
    const uint32_t base = smem_address(storage.k[place.buffer][0]);
    const uint32_t matrix_row = sums.warp % 4 * 16 + sums.lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrix_x4(q[step],
                     base + step / 4 * Config::kTileBytes + swizzle_128(matrix_row, step % 4 * 2 + sums.lane / 16));
    }
    // TMA may be the next to write here.
    fence_async_shared();
  }

  __device__ __forceinline__ void free_half(int which, int half) { storage.free[which][half].arrive(); }

  // Issues scores = Q K^T of the block in the next buffer, part by part as its columns arrive. Leaves a group in flight
  // for each part. ptxas counts products from fence to fence, committed or not, when it makes a wait of `wgmma_wait`:
  // with fewer groups than fences a wait would be for more than it says.
  __device__ __forceinline__ void issue(float (&scores)[kScores]) {
    auto& full = storage.full[place.buffer];
    full[0].wait(place.parity);
    const int column = first_column() + sums.column();
    const uint32_t slots = storage.valid[place.buffer][column / 16] >> column % 16 & 3u;
    present.valid = slots | (__any_sync(0xffffffffu, slots != 0) ? 4u : 0u);

    // The same in all lanes, which lets the descriptors be computed once per warp.
    const uint64_t keys = sm90::k_major_descriptor(__shfl_sync(
        0xffffffffu, smem_address(storage.k[place.buffer][0]) + first_column() * kSwizzleRowBytes, 0));
    sm90::pin_registers(scores);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      if (part > 0) full[part].wait(place.parity);
      fence_async_shared();
      sm90::wgmma_fence();
      multiply(scores, keys, part);
      sm90::wgmma_commit();
    }
    place.advance();
  }

  __device__ __forceinline__ void multiply(float (&scores)[kScores], uint64_t keys, int part) {
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t columns = sm90::descriptor_advance(keys, tile * Config::kTileBytes + step * 32);
        sm90::mma<Atom<Element, Config::kColumns>>(scores, q[tile * 4 + step], columns, tile == 0 && step == 0);
      }
    }
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
