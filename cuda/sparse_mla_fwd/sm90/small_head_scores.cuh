// The scores warpgroup of the small-head variant: scores and softmax of every block. Rows of its accumulator are heads,
// eight of each warp's sixteen; the others are zero. While it makes the softmax of a block, tensor cores work on the
// first scores of the next one.
#pragma once

#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "small_head_storage.cuh"
#include "merge.cuh"
#include "../softmax.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, typename Element, bool kAnyScale>
struct Scores {
  using Mma = typename sm90::Atoms<Element>::ScoresFromRegisters;
  static constexpr int kTileSteps = Config::kTileColumns / 16;  // wgmma k steps in a tile
  static constexpr int kSteps = Config::kKeyTiles * kTileSteps;
  static constexpr int kScores = Config::kTileKeys * 64 / Config::kWarpgroup;

  Storage<Config>& storage;
  const Parameters& params;
  const int32_t first_head;
  // From one lane, so that the compiler knows it to be the same in all, and with it what is behind a branch.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  const int lane = threadIdx.x % 32;
  const int row = row_of_warp() + lane / 4;  // the head that this thread has scores of
  const bool has_heads = warp < Config::kHeadWarps;

  uint32_t q[kSteps][4];  // the second and fourth of each step are the rows that are no heads
  float products[kScores];    // scores in the making; two of four likewise
  float scores[kScores / 2];  // of heads, in the block whose turn the softmax has
  uint64_t valid;             // its entries, a bit each
  // `base` is what a head's exponentials are relative to (softmax.cuh), in units of log2. `maximum` is of this thread's
  // scores, in their units, `sum` of its exponentials.
  float base, maximum, sum;
  bool coarse;    // whether the base of any head of the warp is
  bool occupied;  // whether a block of this query had a valid entry
  bool fenced[Config::kParts];  // late parts of the next block: whether a fence lies behind their arrival
  PipelineState<Config> state;        // of the next block, or Q
  Ring<Config::kHandovers> handover;  // the next one

  __device__ __forceinline__ Scores(Storage<Config>& storage, const Parameters& params, int32_t first_head)
      : storage(storage), params(params), first_head(first_head) {}

  __device__ __forceinline__ int row_of_warp() const { return warp * Config::kWarpHeads; }

  // Takes Q into registers; gives the number of blocks.
  __device__ __forceinline__ int32_t load_query() {
    // Of a step's four 8 x 8 matrices the second and fourth are no heads. Their zeros are loaded too: constants would
    // be put into registers once more for every block.
    const bool is_head = has_heads && lane / 8 % 2 == 0;
    const uint32_t tiles = smem_address(state.tile(storage, 0, 0));
    const uint32_t zeros = smem_address(storage.zeros);
    const uint32_t matrix_row = row_of_warp() + lane % 8;
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      storage.full[state.stage(part)][part].wait(state.full_parity());
#pragma unroll
      for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
        for (int step = 0; step < kTileSteps; ++step) {
          const uint32_t address =
              tiles + tile * Config::kTileBytes + swizzle_128(matrix_row, step * 2 + lane / 16);
          load_matrix_x4(q[tile * kTileSteps + step], is_head ? address : zeros);
        }
      }
    }
    const int32_t blocks = storage.blocks[state.stage(0)];
    // TMA may be the next to write here.
    fence_async_shared();
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) storage.free[state.stage(part)][part].arrive();
    state.advance();
    return blocks;
  }

  // Issues products = Q K^T of one part.
  __device__ __forceinline__ void issue(int part) {
    const uint64_t k = sm90::k_major_descriptor(smem_address(state.tile(storage, 0, 0)));
    sm90::wgmma_fence();
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) {
        sm90::mma<Mma>(products, q[tile * kTileSteps + step],
                       sm90::descriptor_advance(k, tile * Config::kTileBytes + step * 32), tile == 0 && step == 0);
      }
    }
  }

  // The early parts of a block share a fence.
  __device__ __forceinline__ void await_early() {
#pragma unroll
    for (int part = 0; part < Config::kEarlyParts; ++part) {
      storage.full[state.stage(part)][part].wait(state.full_parity());
    }
    fence_async_shared();
  }

  __device__ __forceinline__ void issue_early() {
    sm90::warpgroup_fence_operand(products);
#pragma unroll
    for (int part = 0; part < Config::kEarlyParts; ++part) issue(part);
    sm90::wgmma_commit();
  }

  // Waits for the parts that had not arrived before the last fence.
  __device__ __forceinline__ void issue_late() {
#pragma unroll
    for (int part = Config::kEarlyParts; part < Config::kParts; ++part) {
      if (!fenced[part]) {
        storage.full[state.stage(part)][part].wait(state.full_parity());
        fence_async_shared();
      }
      issue(part);
    }
    sm90::wgmma_commit();
  }

  // Looks which late parts have arrived, ahead of a fence.
  __device__ __forceinline__ void look_for_late() {
#pragma unroll
    for (int part = Config::kEarlyParts; part < Config::kParts; ++part) {
      fenced[part] = has_completed(storage.full[state.stage(part)][part], state.full_parity());
    }
  }

  // Of this thread's scores in the accumulator, the one that is a head's score `i`.
  static __device__ __forceinline__ constexpr int of_head(int i) { return i / 2 * 4 + i % 2; }

  // Takes a block's scores. What is needed next is waited for while they are made: the room for P and, where there is
  // one, the early parts of the next block, whose products follow at once.
  template <bool kIsLast>
  __device__ __forceinline__ void take_scores() {
    valid = *reinterpret_cast<const uint64_t*>(storage.valid[state.stage(0)]);
    state.advance();
    wait_for_handover();
    if constexpr (!kIsLast) await_early();
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(products);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) scores[i] = products[of_head(i)];
    sm90::warpgroup_fence_operand(scores);
    if constexpr (!kIsLast) issue_early();
  }

  // What turns a score into units of log2.
  __device__ __forceinline__ float score_unit() const { return kAnyScale ? 1.f : params.scale_log2; }

  // Masks the scores of invalid entries; gives the maximum of this thread's in units of log2.
  __device__ __forceinline__ float mask_and_maximum() {
    if constexpr (kAnyScale) {
#pragma unroll
      for (float& score : scores) score *= params.scale_log2;
    }
    occupied |= valid != 0;
    if (valid != ~0ull) {
      const uint32_t low = static_cast<uint32_t>(valid) >> (2 * (lane % 4));
      const uint32_t high = static_cast<uint32_t>(valid >> 32) >> (2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int entry = i / 2 * 8 + i % 2;  // less the lane's 2 * (lane % 4)
        const uint32_t bits = entry < 32 ? low : high;
        if (((bits >> (entry % 32)) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
    float largest[4];  // four short chains instead of a long one
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = scores[i];
#pragma unroll
    for (int i = 4; i < kScores / 2; ++i) largest[i % 4] = max_nan(largest[i % 4], scores[i]);
    const float own = max_nan(max_nan(largest[0], largest[1]), max_nan(largest[2], largest[3]));
    maximum = max_nan(maximum, own);
    return own * score_unit();
  }

  // Brings the sum to the base for this block, and says by how much the output has to follow. A base moves where the
  // maximum of any of its four lanes would move it: only then do they ask each other, which takes two shuffles' time.
  __device__ __forceinline__ void move_base(float own_max) {
    const bool moved = __any_sync(0xffffffffu, next_base(base, own_max) != base);
    const uint32_t to = handover.stage;
    if (lane == 0) storage.moved[to][warp] = moved;
    float factor = 1.f;
    if (moved) {
      const float new_base = next_base(base, quad_max(own_max));
      factor = base_factor(base, new_base);
      sum *= factor;
      base = new_base;
      if constexpr (!kAnyScale) coarse = __any_sync(0xffffffffu, is_coarse(new_base));
    }
    if (lane % 4 == 0) storage.factor[to][row] = factor;
  }

  // P = exp2(score - base), handed to the values warpgroup.
  __device__ __forceinline__ void store_probabilities() {
    float unit = score_unit();
    if (!kAnyScale && coarse) {
      // Rounded as the base was, so that the largest score gives exactly 2^0 or less.
#pragma unroll
      for (float& score : scores) score = __fmul_rn(score, unit);
      unit = 1.f;
    }
    const float shift = -finite_or_zero(base);
    uint32_t probabilities[kScores / 4];
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const float p0 = exp2_approx(fmaf(scores[2 * i], unit, shift));
      const float p1 = exp2_approx(fmaf(scores[2 * i + 1], unit, shift));
      sum += p0 + p1;
      probabilities[i] = pack_pair<Element>(p0, p1);
    }
    const uint32_t address = smem_address(storage.p[handover.stage]);
    const uint32_t matrix_row = row_of_warp() + lane % 8;
#pragma unroll
    for (int i = 0; i < kScores / 4; i += 4) {
      store_matrix_x4(address + swizzle_128(matrix_row, i + lane / 8), probabilities[i], probabilities[i + 1],
                      probabilities[i + 2], probabilities[i + 3]);
    }
  }

  __device__ __forceinline__ void wait_for_handover() { storage.p_free[handover.stage].wait(handover.free()); }

  __device__ __forceinline__ void hand_over(bool is_end) {
    if (warp == 0 && lane == 0) storage.is_end[handover.stage] = is_end;
    storage.p_ready[handover.stage].arrive();
    handover.advance();
  }

  // The softmax of the block whose scores were taken. Its fence is that of P, and of the rows that have arrived.
  template <bool kIsLast>
  __device__ __forceinline__ void hand_over_probabilities() {
    if (has_heads) {
      move_base(mask_and_maximum());
      store_probabilities();
    } else if (lane == 0) {
      storage.moved[handover.stage][warp] = false;
    }
    if constexpr (!kIsLast) look_for_late();
    fence_async_shared();
    hand_over(false);
  }

  // Goes through all blocks of a query.
  __device__ __forceinline__ void accumulate() {
    coarse = occupied = false;
    base = maximum = negative_infinity();
    sum = 0.f;
    const int32_t blocks = load_query();
    if (blocks == 0) return;
    await_early();
    issue_early();
    for (bool& part : fenced) part = false;
    for (int block = 1; block < blocks; ++block) {
      issue_late();
      take_scores<false>();
      hand_over_probabilities<false>();
    }
    issue_late();
    take_scores<true>();
    hand_over_probabilities<true>();
  }

  __device__ __forceinline__ RowStatistics join_statistics() {
    return {base, quad_max(maximum), quad_sum(sum), occupied};
  }

  // Writes the statistics of a query, and hands the values warpgroup what makes its output the result.
  __device__ __forceinline__ void store_result(const Query& query) {
    const RowStatistics joined = join_statistics();
    wait_for_handover();
    if (has_heads && lane % 4 == 0) {
      const int head = first_head + row;
      storage.factor[handover.stage][row] = output_factor(params, head, joined, 0.f);
      if (head < params.h_q) store_statistics(params, query, head, joined);
    }
    hand_over(true);
  }

  // Leaves the statistics for the CTAs of the cluster.
  __device__ __forceinline__ void leave() {
    const RowStatistics joined = join_statistics();
    wait_for_handover();
    hand_over(true);
    meet_behind_tiles(storage);
    if (has_heads && lane % 4 == 0) leavings(storage).statistics[row] = packed(joined);
  }
};

}  // namespace cupymla::sparse_mla_fwd
