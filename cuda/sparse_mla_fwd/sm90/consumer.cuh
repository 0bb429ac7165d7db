// A consumer warpgroup: scores and softmax of every second block, and its half of the output columns of all blocks.
#pragma once

#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "query.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, typename Element, int kWho>
struct Consumer {
  using Atom = sm90::Atoms<Element>;
  static constexpr int kOther = 1 - kWho;
  static constexpr int kSteps = Config::kSlots / 16;  // wgmma k steps in a block of slots
  static constexpr int kScores = Config::kHeads * Config::kSlots / Config::kWarpgroup;
  static constexpr int kOutputs = Config::kHeads * Config::kDV / 2 / Config::kWarpgroup;

  Storage<Config>& storage;
  const Parameters& params;
  const int warp;   // 0..3 in this warpgroup
  const int lane;
  const int row;    // this thread's accumulator rows are `row` and `row + 8`

  float output[kOutputs];
  float scores[kScores];
  uint32_t probabilities[kSteps][4];
  // In units of log2 and of exp2(score - row_max), over the blocks gone through (sums: over the own ones).
  float row_max[2];
  float row_sum[2];

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params)
      : storage(storage),
        params(params),
        warp((threadIdx.x / 32) % 4),
        lane(threadIdx.x % 32),
        row(warp * 16 + lane / 4) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = negative_infinity();
      row_sum[r] = 0.f;
    }
  }

  // Issues scores = Q K^T of the own block, part by part as its columns arrive.
  __device__ __forceinline__ void issue_scores(uint32_t parity) {
    const uint64_t q = sm90::k_major_descriptor(smem_address(storage.q[0]));
    const uint64_t k = sm90::k_major_descriptor(smem_address(storage.k[kWho][0]));
    sm90::pin_registers(scores);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      storage.full[kWho][part].wait(parity);
      fence_async_shared();
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

  // Waits for the scores. Consumer 1 does so before it touches the output: ptxas would put the same wait there.
  __device__ __forceinline__ void finish_scores() {
    sm90::wgmma_wait<0>();
    sm90::pin_registers(scores);
  }

  // Descriptor of the own value columns of the block in `buffer`.
  __device__ __forceinline__ uint64_t values(int buffer) const {
    return sm90::mn_major_descriptor(smem_address(storage.k[buffer][kWho * Config::kHalfTiles]), Config::kTileBytes);
  }

  // Issues output += P V of the own block, P from registers.
  __device__ __forceinline__ void issue_own_values() {
    const uint64_t v = values(kWho);
    sm90::pin_registers(output);
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
    sm90::pin_registers(output);
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
    sm90::pin_registers(output);
    if (lane == 0) storage.free[buffer][kWho].arrive();
  }

  // Brings output and row sums to a new running maximum. No product may be in flight.
  __device__ __forceinline__ void move_maximum(const float (&new_max)[2]) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = exp2_approx(row_max[r] - finite_or_zero(new_max[r]));
      row_max[r] = new_max[r];
      row_sum[r] *= factor[r];
    }
    // Most blocks do not move any maximum of a warp's rows; the vote keeps its lanes together.
    if (__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= factor[(i / 2) % 2];
    }
  }

  // With no valid slot so far the maximum is -inf; any finite stand-in makes every exponential 0.
  static __device__ __forceinline__ float finite_or_zero(float x) { return x == negative_infinity() ? 0.f : x; }

  // Scales the scores to units of log2, masks invalid slots, and gives the maximum over `row_max` and this block.
  __device__ __forceinline__ void mask_and_maximum(float (&new_max)[2]) {
    const uint64_t valid = *reinterpret_cast<const uint64_t*>(storage.valid[kWho]);
    const uint32_t low = static_cast<uint32_t>(valid) >> (2 * (lane % 4));
    const uint32_t high = static_cast<uint32_t>(valid >> 32) >> (2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= params.scale_log2;
    if (valid != ~0ull) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int column = (i / 4) * 8 + i % 2;  // less the lane's 2 * (lane % 4)
        const uint32_t bits = column < 32 ? low : high;
        if (((bits >> (column % 32)) & 1u) == 0) scores[i] = negative_infinity();
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float block_max = negative_infinity();
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        block_max = max_nan(block_max, max_nan(scores[i + 2 * r], scores[i + 2 * r + 1]));
      }
      new_max[r] = max_nan(row_max[r], quad_max(block_max));
    }
  }

  // P = exp2(score - new_max), into registers as MMA fragments; gives this thread's share of the row sums.
  __device__ __forceinline__ void exponentials(const float (&new_max)[2], float (&block_sum)[2]) {
    block_sum[0] = block_sum[1] = 0.f;
    const float shift[2] = {finite_or_zero(new_max[0]), finite_or_zero(new_max[1])};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = (i / 2) % 2;
      scores[i] = exp2_approx(scores[i] - shift[r]);
      block_sum[r] += scores[i];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        probabilities[step][j] = pack_pair<Element>(scores[step * 8 + j * 2], scores[step * 8 + j * 2 + 1]);
      }
    }
  }

  // Hands P and the maxima of the own block to the other consumer.
  __device__ __forceinline__ void publish() {
    const uint32_t base = smem_address(storage.probabilities(kWho));
    const uint32_t matrix_row = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& p = probabilities[step];
      store_matrix_x4(base + swizzle_128(matrix_row, step * 2 + lane / 16), p[0], p[1], p[2], p[3]);
    }
    if (lane % 4 == 0) {
      storage.row_max[kWho][row] = row_max[0];
      storage.row_max[kWho][row + 8] = row_max[1];
    }
    fence_async_shared();
    named_barrier_arrive(kProbabilitiesReady + kWho, 2 * Config::kWarpgroup);
  }

  // Takes the maxima that go with the other consumer's P.
  __device__ __forceinline__ void receive(float (&new_max)[2]) {
    named_barrier_sync(kProbabilitiesReady + kOther, 2 * Config::kWarpgroup);
    new_max[0] = storage.row_max[kOther][row];
    new_max[1] = storage.row_max[kOther][row + 8];
  }

  // Consumer 0 on a pair of blocks: its own comes first, then the other's.
  __device__ __forceinline__ void first_of_pair(uint32_t parity) {
    float new_max[2];
    own_block_first(parity);
    receive(new_max);
    finish_values(kWho);
    move_maximum(new_max);
    issue_other_values();
    finish_values(kOther);
  }

  // Consumer 0 up to its P V, which is left in flight.
  __device__ __forceinline__ void own_block_first(uint32_t parity) {
    float new_max[2], block_sum[2];
    issue_scores(parity);
    finish_scores();
    mask_and_maximum(new_max);
    exponentials(new_max, block_sum);
    move_maximum(new_max);
    add_sums(block_sum);
    named_barrier_sync(kKeysRead + kWho, Config::kWarpgroup);
    publish();
    issue_own_values();
  }

  // Consumer 1 on a pair: the other's block comes first; its product runs under the own softmax.
  __device__ __forceinline__ void second_of_pair(uint32_t parity) {
    float new_max[2], block_sum[2];
    issue_scores(parity);
    receive(new_max);
    finish_scores();
    move_maximum(new_max);
    issue_other_values();
    mask_and_maximum(new_max);
    exponentials(new_max, block_sum);
    finish_values(kOther);
    move_maximum(new_max);
    add_sums(block_sum);
    named_barrier_sync(kKeysRead + kWho, Config::kWarpgroup);
    publish();
    issue_own_values();
    finish_values(kWho);
  }

  // The last block when it has no partner. It belongs to consumer 0.
  __device__ __forceinline__ void single_block(uint32_t parity) {
    if constexpr (kWho == 0) {
      own_block_first(parity);
      finish_values(kWho);
    } else {
      float new_max[2];
      receive(new_max);
      move_maximum(new_max);
      issue_other_values();
      finish_values(kOther);
    }
  }

  __device__ __forceinline__ void add_sums(const float (&block_sum)[2]) {
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
  }

  __device__ __forceinline__ void run(const Query<Config>& query) {
    storage.q_full.wait(0);
    uint32_t parity = 0;
    for (int pair = 0; pair < query.blocks / 2; ++pair) {
      if constexpr (kWho == 0) {
        first_of_pair(parity);
      } else {
        second_of_pair(parity);
      }
      parity ^= 1u;
    }
    if (query.blocks % 2 != 0) single_block(parity);
  }
};

}  // namespace cupymla::sparse_mla_fwd
