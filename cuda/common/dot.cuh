// Dot products of 16-bit elements in fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "integers.cuh"

namespace cupymla {

// Of eight neighbours, from 16 bytes of either side.
template <typename Element>
__device__ __forceinline__ float dot_eight(const uint4& a, const uint4& b) {
  const Element* x = reinterpret_cast<const Element*>(&a);
  const Element* y = reinterpret_cast<const Element*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

}  // namespace cupymla
