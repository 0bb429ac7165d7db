// From products to weights: exponentials, and their sum over the sixteen heads of a warp.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"

namespace cupymla::attn_dist {

// Each lane of a warp has sixteen products of two heads, `lane / 4` and the one eight further, as the accumulator of a
// wgmma with 64 columns lies.
struct HeadSums {
  static constexpr int kTiles = 8;  // groups of eight columns in an accumulator
  static constexpr int kScores = 4 * kTiles;

  const int lane;

  // The first of the two columns that `sum` leaves to this lane.
  __device__ __forceinline__ int column() const { return lane / 4 * 8 + lane % 4 * 2; }

  // The lse of the warp's sixteen heads, of which `heads` exist, as the caller gave it, one per lane; +inf where there
  // is no head.
  __device__ __forceinline__ float read_lse(const float* lse, int64_t stride, int32_t heads) const {
    return lane < 16 && lane < heads ? __ldg(lse + lane * stride) : positive_infinity();
  }

  // Keeps them in shared memory, to spare registers.
  __device__ __forceinline__ void keep_lse(Log2Lse (&kept)[16], float lse, const Parameters& params) const {
    if (lane < 16) kept[lane] = log2_lse(lse, params.unit, params.unit_rest);
    __syncwarp();
  }

  // Products of the warp's sixteen heads, of which `heads` exist -> each lane's two sums over them, of columns
  // `column()` and the one after it.
  __device__ __forceinline__ void sum(float (&scores)[kScores], int32_t heads, const Log2Lse (&lse)[16],
                                      float scale_log2, float (&sums)[2]) const {
    if (heads < 16) {
      // Their Q is zero, their lse +inf; but zero times a key's infinity is NaN.
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (lane / 4 + i % 4 / 2 * 8 >= heads) scores[i] = 0.f;
      }
    }
    const Log2Lse low = lse[lane / 4], high = lse[lane / 4 + 8];
    float column_sums[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int first = i / 2 * 4 + i % 2;
      column_sums[i] = fmaf(power(scores[first + 2], high, scale_log2), high.factor,
                            power(scores[first], low, scale_log2) * low.factor);
    }
    add_lanes<2 * kTiles, 16>(column_sums);
    sums[0] = column_sums[0];
    sums[1] = column_sums[1];
  }

  // A weight but for its head's factor.
  static __device__ __forceinline__ float power(float product, const Log2Lse& lse, float scale_log2) {
    return exp2_approx(fmaf(product, scale_log2, -lse.rounded));
  }

  // Sums over the eight lanes that hold the same columns, halving what each holds until two columns are left.
  template <int kCount, int kMask, int kAll>
  __device__ __forceinline__ void add_lanes(float (&values)[kAll]) const {
    if constexpr (kCount > 2) {
      const bool upper = (lane & kMask) != 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float kept = upper ? values[i + kCount / 2] : values[i];
        const float given = upper ? values[i] : values[i + kCount / 2];
        values[i] = kept + __shfl_xor_sync(0xffffffffu, given, kMask);
      }
      add_lanes<kCount / 2, kMask / 2>(values);
    }
  }
};

}  // namespace cupymla::attn_dist
