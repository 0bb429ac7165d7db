// The scale of operands of gradients.
#pragma once

#include "../../common/math.cuh"

namespace cupymla::indexer_loss_dense {

constexpr bool kScaled = CUPYMLA_FP16 != 0;  // bf16 has the exponents of fp32

// The power of two that brings a finite number, not negative, near 2^14; 1 for zero, and for bf16.
__device__ __forceinline__ float operand_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return kScaled && largest > 0.0f ? power_of_two(max(-120, min(120, 14 - exponent))) : 1.0f;
}

}  // namespace cupymla::indexer_loss_dense
