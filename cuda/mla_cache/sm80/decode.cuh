// Eight E4M3 codes and their scale to numbers.
#pragma once

#include "../../common/fp8_fp4.cuh"
#include "../../common/types.cuh"
#include "floats.cuh"

namespace cupymla::mla_cache {

// One fp32 product each.
__device__ __forceinline__ void decode(float (&values)[kChannels], uint2 codes, float scale) {
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    const uint32_t word = i < 2 ? codes.x : codes.y;
    const float2 pair = __half22float2(halves_of_e4m3(i % 2 == 0 ? word & 0xffffu : word >> 16));
    values[2 * i] = __fmul_rn(pair.x, scale);
    values[2 * i + 1] = __fmul_rn(pair.y, scale);
  }
}

}  // namespace cupymla::mla_cache
