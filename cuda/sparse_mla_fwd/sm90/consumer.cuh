// A consumer warpgroup where heads are many: scores and softmax of every second block, and its half of the output
// columns of all blocks.
#pragma once

#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "query.cuh"
#include "../softmax.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, typename Element, int kWarpgroupIdx, bool kAnyScale>
struct Consumer {
  using Atom = sm90::Atoms<Element>;
  static constexpr int kOther = 1 - kWarpgroupIdx;
  static constexpr int kSteps = Config::kTileKeys / 16;  // wgmma k steps in a block of entries
  static constexpr int kScores = Config::kHeads * Config::kTileKeys / Config::kWarpgroup;
  static constexpr int kOutputs = Config::kHeads * Config::kDV / 2 / Config::kWarpgroup;

  Storage<Config>& storage;
  const Parameters& params;
  const int warp;   // 0..3 in this warpgroup
  const int lane;
  const int32_t first_head;
  const int row;    // this thread's accumulator rows are `row` and `row + 8`

  float output[kOutputs];
  float scores[kScores];
  uint32_t probabilities[kSteps][4];
  // Exponentials are taken relative to `base` (softmax.cuh), in units of log2, which all blocks move. `row_max` is the
  // true maximum, in units of scores, and `row_sum` the sum of exponentials, both over the own blocks.
  float base[2];
  float row_max[2];
  float row_sum[2];

  bool coarse;    // whether the base of any row of the warp is
  bool occupied;  // whether an own block of this query had a valid entry
  uint32_t k_parity = 0;  // of the own buffer's next phase
  uint32_t p_parity = 0;  // of the other's next P
  uint32_t base_parity = 0;
  uint32_t q_parity = 0;  // of this query, which is also its set of row statistics

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params, int32_t first_head)
      : storage(storage),
        params(params),
        warp((threadIdx.x / 32) % 4),
        lane(threadIdx.x % 32),
        first_head(first_head),
        row(warp * 16 + lane / 4) {}

  __device__ __forceinline__ void clear() {
    coarse = occupied = false;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = row_max[r] = negative_infinity();
      row_sum[r] = 0.f;
    }
  }

  // Waits for a part of the own block, and looks which of the parts behind it have arrived too: they share its fence,
  // as a wait and a fence cost as much as four products each, in which tensor cores have nothing of this warpgroup.
  __device__ __forceinline__ void await_part(int part, bool (&fenced)[Config::kParts]) {
    // Parts from which on the own warpgroup has made the block.
    constexpr int kOwnParts = Config::kConsumersConvert ? Config::kLeftParts : Config::kParts;
    if (part >= kOwnParts) {
      if (part == kOwnParts) named_barrier_sync(kOwnConverted + kWarpgroupIdx, Config::kWarpgroup);
      return;
    }
    if (fenced[part]) return;
    storage.full[kWarpgroupIdx][part].wait(k_parity);
#pragma unroll
    for (int later = part + 1; later < kOwnParts; ++later) {
      fenced[later] = has_completed(storage.full[kWarpgroupIdx][later], k_parity);
    }
    fence_async_shared();
  }

  // Issues scores = Q K^T of the own block, as its columns arrive.
  __device__ __forceinline__ void issue_scores() {
    const uint64_t q = sm90::k_major_descriptor(smem_address(storage.q[0]));
    const uint64_t k = sm90::k_major_descriptor(smem_address(storage.k[kWarpgroupIdx][0]));
    bool fenced[Config::kParts] = {};
    if constexpr (Config::kConsumersConvert) convert_own_block(*this);
    sm90::warpgroup_fence_operand(scores);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      await_part(part, fenced);
      sm90::wgmma_fence();
#pragma unroll
      for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const uint32_t offset = tile * Config::kTileBytes + step * 32;
          sm90::mma<typename Atom::Scores>(scores, sm90::descriptor_advance(q, offset),
                                           sm90::descriptor_advance(k, offset), tile == 0 && step == 0);
        }
      }
    }
    sm90::wgmma_commit();
  }

  // Waits for the scores; after the last ones of a query its Q may be replaced.
  __device__ __forceinline__ void finish_scores(bool last) {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
    k_parity ^= 1u;
    if (last) storage.q_free.arrive();
  }

  // Descriptor of the own value columns of the block in `buffer`.
  __device__ __forceinline__ uint64_t values(int buffer) const {
    return sm90::mn_major_descriptor(smem_address(storage.k[buffer][kWarpgroupIdx * Config::kHalfTiles]),
                                     Config::kTileBytes);
  }

  // Issues output += P V of the own block, P from registers.
  __device__ __forceinline__ void issue_own_values() {
    const uint64_t v = values(kWarpgroupIdx);
    sm90::warpgroup_fence_operand(output);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<typename Atom::ValuesFromRegisters>(output, probabilities[step],
                                                    sm90::descriptor_advance(v, step * 2 * kSwizzleAtomBytes));
    }
    sm90::wgmma_commit();
  }

  // Issues output += P V of the other consumer's block, P from shared memory.
  __device__ __forceinline__ void issue_other_values() {
    const uint64_t p = sm90::k_major_descriptor(smem_address(storage.probabilities(kOther)));
    const uint64_t v = values(kOther);
    sm90::warpgroup_fence_operand(output);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<typename Atom::ValuesFromShared>(output, sm90::descriptor_advance(p, step * 32),
                                                 sm90::descriptor_advance(v, step * 2 * kSwizzleAtomBytes));
    }
    sm90::wgmma_commit();
  }

  // Waits for all products; the columns of `buffer` that this consumer reads may then be refilled.
  __device__ __forceinline__ void finish_values(int buffer) {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(output);
    storage.free[buffer][kWarpgroupIdx].arrive();
  }

  // Whether a base is another than this consumer's for any row of the warp.
  __device__ __forceinline__ bool moves(const float (&new_base)[2]) const {
    return __any_sync(0xffffffffu, new_base[0] != base[0] || new_base[1] != base[1]);
  }

  __device__ __forceinline__ void note_coarseness(const float (&new_base)[2]) {
    coarse = __any_sync(0xffffffffu, is_coarse(new_base[0]) || is_coarse(new_base[1]));
  }

  // Brings output and row sums to a new base, if it is one. No product may be in flight. `fresh` output is zero yet: it
  // stays what it is, and the code that would bring it is not waited for.
  __device__ __forceinline__ void move_base(const float (&new_base)[2], bool fresh = false) {
    if (!moves(new_base)) return;
    if constexpr (!kAnyScale) note_coarseness(new_base);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = base_factor(base[r], new_base[r]);
      row_sum[r] *= factor[r];
      base[r] = new_base[r];
    }
    if (fresh) return;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] *= factor[(i / 2) % 2];
  }

  // Masks the scores of invalid entries and gives the maxima of this block, which also go into `row_max`.
  __device__ __forceinline__ void mask_and_maxima(float (&block_max)[2]) {
    if constexpr (kAnyScale) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] *= params.scale_log2;
    }
    const uint64_t valid = *reinterpret_cast<const uint64_t*>(storage.valid[kWarpgroupIdx]);
    occupied |= valid != 0;
    if (valid != ~0ull) {
      const uint32_t low = static_cast<uint32_t>(valid) >> (2 * (lane % 4));
      const uint32_t high = static_cast<uint32_t>(valid >> 32) >> (2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int column = (i / 4) * 8 + i % 2;  // less the lane's 2 * (lane % 4)
        const uint32_t bits = column < 32 ? low : high;
        if (((bits >> (column % 32)) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = max_nan(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int i = 4; i < kScores; i += 4) m = max_nan(m, max_nan(scores[i + 2 * r], scores[i + 2 * r + 1]));
      m = quad_max(m);
      block_max[r] = m * score_unit();
      row_max[r] = max_nan(row_max[r], m);
    }
  }

  // What turns a score into units of log2.
  __device__ __forceinline__ float score_unit() const { return kAnyScale ? 1.f : params.scale_log2; }

  // The base for a block with these maxima, given the base before it; whether it is another than this consumer's for
  // any row of the warp.
  __device__ __forceinline__ bool choose_base(float (&new_base)[2], const float (&old_base)[2],
                                              const float (&block_max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) new_base[r] = next_base(old_base[r], block_max[r]);
    const bool moved = moves(new_base);
    if (!kAnyScale && moved) note_coarseness(new_base);
    return moved;
  }

  // P = exp2(score - base), into registers as MMA fragments; gives this thread's share of the row sums.
  __device__ __forceinline__ void exponentials(const float (&new_base)[2], float (&block_sum)[2]) {
    float unit = score_unit();
    if (!kAnyScale && coarse) {
      // Rounded as the base was, so that the largest score gives exactly 2^0 or less.
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = __fmul_rn(scores[i], unit);
      unit = 1.f;
    }
    block_sum[0] = block_sum[1] = 0.f;
    const float shift[2] = {-finite_or_zero(new_base[0]), -finite_or_zero(new_base[1])};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = step * 8 + j * 2;
        const float p0 = exp2_approx(fmaf(scores[i], unit, shift[j % 2]));
        const float p1 = exp2_approx(fmaf(scores[i + 1], unit, shift[j % 2]));
        block_sum[j % 2] += p0 + p1;
        probabilities[step][j] = pack_pair<Element>(p0, p1);
      }
    }
  }

  __device__ __forceinline__ void share_base(const float (&new_base)[2]) {
    if (lane % 4 == 0) {
      storage.base[kWarpgroupIdx][row] = new_base[0];
      storage.base[kWarpgroupIdx][row + 8] = new_base[1];
    }
  }

  __device__ __forceinline__ void read_base(float (&new_base)[2]) const {
    new_base[0] = storage.base[kOther][row];
    new_base[1] = storage.base[kOther][row + 8];
  }

  // Consumer 1: the base of consumer 0's block, which is out before its P.
  __device__ __forceinline__ void wait_for_other_base(float (&new_base)[2]) {
    storage.base_ready.wait(base_parity);
    base_parity ^= 1u;
    read_base(new_base);
  }

  // Hands P of the own block to the other consumer.
  __device__ __forceinline__ void publish() {
    // P0 may lie where keys lay: not before every warp's scores are done.
    if constexpr (kWarpgroupIdx == 0 && Storage<Config>::kHasRopeTile) {
      named_barrier_sync(kKeysRead, Config::kWarpgroup);
    }
    const uint32_t address = smem_address(storage.probabilities(kWarpgroupIdx));
    const uint32_t matrix_row = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& p = probabilities[step];
      store_matrix_x4(address + swizzle_128(matrix_row, step * 2 + lane / 16), p[0], p[1], p[2], p[3]);
    }
    fence_async_shared();
    storage.p_ready[kWarpgroupIdx].arrive();
  }

  __device__ __forceinline__ void wait_for_other_probabilities() {
    storage.p_ready[kOther].wait(p_parity);
    p_parity ^= 1u;
  }

  // Consumer 0 up to its P V, which is left in flight.
  __device__ __forceinline__ void first_block(bool last, bool fresh) {
    float block_max[2], new_base[2], block_sum[2];
    issue_scores();
    finish_scores(last);
    mask_and_maxima(block_max);
    const bool moved = choose_base(new_base, base, block_max);
    share_base(new_base);
    storage.base_ready.arrive();
    exponentials(new_base, block_sum);
    publish();
    if (moved) move_base(new_base, fresh);
    add_sums(block_sum);
    issue_own_values();
  }

  // Consumer 0 on a pair of blocks: its own comes first, then the other's.
  __device__ __forceinline__ void first_of_pair(bool last, bool fresh) {
    float new_base[2];
    first_block(last, fresh);
    finish_values(kWarpgroupIdx);
    wait_for_other_probabilities();
    read_base(new_base);
    move_base(new_base);
    issue_other_values();
    finish_values(kOther);
  }

  // Consumer 1 on a pair: the other's block comes first, but only its base is needed for the own softmax, under most of
  // which tensor cores have the other's products. Its scores come later than the other's, and so does its softmax.
  __device__ __forceinline__ void second_of_pair(bool last, bool fresh) {
    float block_max[2], first_base[2], new_base[2], block_sum[2];
    issue_scores();
    finish_scores(last);
    mask_and_maxima(block_max);
    wait_for_other_base(first_base);
    move_base(first_base, fresh);
    wait_for_other_probabilities();
    issue_other_values();
    const bool moved = choose_base(new_base, first_base, block_max);
    exponentials(new_base, block_sum);
    share_base(new_base);
    publish();
    finish_values(kOther);
    if (moved) move_base(new_base);
    add_sums(block_sum);
    issue_own_values();
    finish_values(kWarpgroupIdx);
  }

  // The last block when it has no partner. It belongs to consumer 0.
  __device__ __forceinline__ void single_block(bool fresh) {
    if constexpr (kWarpgroupIdx == 0) {
      first_block(true, fresh);
      finish_values(kWarpgroupIdx);
    } else {
      float new_base[2];
      wait_for_other_base(new_base);
      wait_for_other_probabilities();
      move_base(new_base, fresh);
      issue_other_values();
      finish_values(kOther);
    }
  }

  __device__ __forceinline__ void add_sums(const float (&block_sum)[2]) {
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
  }

  // Goes through all blocks of a query.
  __device__ __forceinline__ void accumulate() {
    clear();
    storage.q_full.wait(q_parity);
    const int32_t blocks = storage.blocks;
    const bool single = blocks % 2 != 0;
    // Scores that this consumer multiplies last, or never: then Q is free at once.
    const int last_pair = kWarpgroupIdx == 0 && single ? -1 : blocks / 2 - 1;
    if (blocks < 1 + kWarpgroupIdx) storage.q_free.arrive();
    for (int pair = 0; pair < blocks / 2; ++pair) {
      const bool fresh = Config::kSkipsFresh && pair == 0;
      if constexpr (kWarpgroupIdx == 0) {
        first_of_pair(pair == last_pair, fresh);
      } else {
        second_of_pair(pair == last_pair, fresh);
      }
    }
    if (single) single_block(Config::kSkipsFresh && blocks == 1);
  }
};

}  // namespace cupymla::sparse_mla_fwd
