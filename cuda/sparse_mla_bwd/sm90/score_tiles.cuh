// P and dS of 64 heads and the 64 slots of a block, from accumulators of a warpgroup to tiles in shared memory.
#pragma once

#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kScoreCount = 32;  // of a thread: 64 heads x 64 slots over 128
constexpr int kScoreSteps = 4;   // of sixteen slots

// Which of a thread's sixteen columns are valid slots, for either of its heads: bit c for column c less the lane's
// 2 * (lane % 4).
struct SlotMask {
  uint32_t low[2], high[2];

  // `words`: one bit for each slot; `heads`: all ones where there is such a head.
  __device__ __forceinline__ SlotMask(uint64_t words, int lane, const uint32_t (&heads)[2]) {
    const uint64_t shifted = words >> (2 * (lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      low[r] = static_cast<uint32_t>(shifted) & heads[r];
      high[r] = static_cast<uint32_t>(shifted >> 32) & heads[r];
    }
  }

  __device__ __forceinline__ bool has(int i) const {
    const int column = (i / 4) * 8 + i % 2;
    const int r = (i / 2) % 2;
    return (((column < 32 ? low[r] : high[r]) >> (column % 32)) & 1u) != 0;
  }
};

// The same where all slots are valid, and there are all heads.
struct EverySlot {
  static __device__ __forceinline__ bool has(int) { return true; }
};

// Where a lane's row of one step of a tile of heads x slots lies, for stmatrix and ldmatrix.
struct FragmentPlace {
  const int row, chunk;

  __device__ __forceinline__ FragmentPlace(int warp, int lane) : row(warp * 16 + lane % 16), chunk(lane / 16) {}
  __device__ __forceinline__ uint32_t address(const uint8_t* tile, int step) const {
    return smem_address(tile) + swizzle_128(row, step * 2 + chunk);
  }
};

// Scores of half of the slots become weights of the softmax, but for their heads' factors.
template <int kHalf, typename Mask>
__device__ __forceinline__ void weigh_half(float (&scores)[kScoreCount], const Mask& mask, float scale_log2,
                                           const float (&lse)[2]) {
#pragma unroll
  for (int i = kHalf * kScoreCount / 2; i < (kHalf + 1) * kScoreCount / 2; ++i) {
    const float p = exp2_approx(fmaf(scores[i], scale_log2, -lse[i / 2 % 2]));
    scores[i] = mask.has(i) ? p : 0.f;
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  const Element* elements = reinterpret_cast<const Element*>(&pair);
  return make_float2(static_cast<float>(elements[0]), static_cast<float>(elements[1]));
}

// P of half of the slots, rounded, into its tile, and into another one what that loses: so who reads both knows P to
// twice the precision. `share`: what P is the weights times.
template <typename Element, int kHalf>
__device__ __forceinline__ void put_probabilities(const float (&weights)[kScoreCount], const float (&share)[2],
                                                  const FragmentPlace& place, uint8_t* p, uint8_t* lost) {
#pragma unroll
  for (int step = kHalf * kScoreSteps / 2; step < (kHalf + 1) * kScoreSteps / 2; ++step) {
    uint32_t rounded[4], rest[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = step * 8 + j * 2;
      const float x = weights[i] * share[j % 2], y = weights[i + 1] * share[j % 2];
      rounded[j] = pack_pair<Element>(x, y);
      const float2 kept = unpack_pair<Element>(rounded[j]);
      rest[j] = pack_pair<Element>(x - kept.x, y - kept.y);
    }
    store_matrix_x4(place.address(p, step), rounded[0], rounded[1], rounded[2], rounded[3]);
    store_matrix_x4(place.address(lost, step), rest[0], rest[1], rest[2], rest[3]);
  }
}

// dS of half of the slots, from dP and both tiles of P, to where what P lost was.
template <typename Element, int kHalf, typename Mask>
__device__ __forceinline__ void put_score_gradients(float (&scores)[kScoreCount], const float (&delta)[2],
                                                    const Mask& mask, float sm_scale, const FragmentPlace& place,
                                                    const uint8_t* p, uint8_t* ds) {
#pragma unroll
  for (int step = kHalf * kScoreSteps / 2; step < (kHalf + 1) * kScoreSteps / 2; ++step) {
    uint32_t rounded[4], lost[4];
    load_matrix_x4(rounded, place.address(p, step));
    load_matrix_x4(lost, place.address(ds, step));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 first = unpack_pair<Element>(rounded[j]), second = unpack_pair<Element>(lost[j]);
      const float weight[2] = {first.x + second.x, first.y + second.y};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = step * 8 + j * 2 + c;
        const float gradient = weight[c] * (scores[i] - delta[j % 2]) * sm_scale;
        scores[i] = mask.has(i) ? gradient : 0.f;
      }
    }
  }
  // A warp stores to its own rows only, which it has read.
  __syncwarp();
#pragma unroll
  for (int step = kHalf * kScoreSteps / 2; step < (kHalf + 1) * kScoreSteps / 2; ++step) {
    const float* s = scores + step * 8;
    store_matrix_x4(place.address(ds, step), pack_pair<Element>(s[0], s[1]), pack_pair<Element>(s[2], s[3]),
                    pack_pair<Element>(s[4], s[5]), pack_pair<Element>(s[6], s[7]));
  }
}

// Leaves the sums of the weights of a block over each warp's heads in shared memory.
__device__ __forceinline__ void sum_over_heads(const float (&weights)[kScoreCount], const float (&factor)[2],
                                               float* of_warp, int lane) {
#pragma unroll
  for (int i = 0; i < kScoreCount; i += 4) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float sum = fmaf(weights[i + column + 2], factor[1], weights[i + column] * factor[0]);
      sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (lane < 4) of_warp[i * 2 + lane * 2 + column] = sum;
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
