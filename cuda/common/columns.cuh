// Reductions over the lanes that share a column of a 64 x N wgmma accumulator: those whose numbers agree modulo four
// (PTX ISA, "Register fragments for wgmma.mma_async", matrix D).
#pragma once

#include "math.cuh"

namespace cupymla {

// Of a lane's kCount columns, its `j`-th: the column of the accumulator.
__device__ __forceinline__ constexpr int column_of(int j, int lane) { return j / 2 * 8 + lane % 4 * 2 + j % 2; }

// Which of its kCount columns a lane is left with by `reduce_columns`.
template <int kCount>
__device__ __forceinline__ constexpr int owned_column(int lane) {
  static_assert(kCount == 4 || kCount == 8);
  return lane / (32 / kCount);
}

// Combines one value per column over the eight lanes that share it. Each exchange halves the columns that a lane
// answers for, so that eight columns take 4 + 2 + 1 shuffles.
template <int kCount, typename Combine>
__device__ __forceinline__ float reduce_columns(float (&values)[kCount], int lane, Combine combine) {
  static_assert(kCount == 4 || kCount == 8);
  int distance = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float received = __shfl_xor_sync(0xffffffffu, upper ? values[j] : values[j + half], distance);
      values[j] = combine(upper ? values[j + half] : values[j], received);
    }
    distance /= 2;
  }
  if constexpr (kCount == 4) values[0] = combine(values[0], __shfl_xor_sync(0xffffffffu, values[0], 4));
  return values[0];
}

// values[j], where j differs between lanes: no register can be addressed by number.
template <int kCount>
__device__ __forceinline__ float pick(const float (&values)[kCount], int j) {
  float picked = values[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) picked = i == j ? values[i] : picked;
  return picked;
}

}  // namespace cupymla
