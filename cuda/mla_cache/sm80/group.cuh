// A group of channels with one scale, eight in each of neighbouring lanes: its largest magnitude, and its codes.
#pragma once

#include "e4m3.cuh"
#include "floats.cuh"

namespace cupymla::mla_cache {

// The largest finite number of a type: an infinity counts as it.
__device__ __forceinline__ float largest(int32_t type) {
  return type == kFloat16 ? 65504.0f : __uint_as_float(type == kBfloat16 ? 0x7f7f0000u : 0x7f7fffffu);
}

// The largest magnitude of a group, by all its lanes; infinities become `limit`. NaN is left as it is, and passed over.
__device__ __forceinline__ float largest_magnitude(float (&values)[kChannels], float limit, int lanes) {
  float most = 0.0f;
#pragma unroll
  for (const float value : values) most = fmaxf(most, fabsf(value));
  if (most > limit) {
#pragma unroll
    for (float& value : values) {
      if (fabsf(value) > limit) value = copysignf(limit, value);
    }
    most = limit;
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
  }
  return most;
}

// Quotients by one positive number, rounded as IEEE 754 has it: a product with its reciprocal and two corrections by
// the remainder, which FMA gives exactly (P. Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990). Remainders have their sign turned, which keeps the sign of zero. Quotients below 2^-11
// may be off: their code is 0 anyway.
struct Divisor {
  const float divisor;
  float reciprocal;

  __device__ __forceinline__ explicit Divisor(float divisor) : divisor(divisor) {
    const float first = __frcp_rn(divisor);
    reciprocal = __fmaf_rn(__fmaf_rn(-divisor, first, 1.0f), first, first);
  }

  // Of others a remainder may be subnormal.
  static __device__ __forceinline__ bool takes(float divisor) { return divisor >= 0x1p-64f && divisor <= 0x1p64f; }

  __device__ __forceinline__ float corrected(float value, float quotient) const {
    return __fmaf_rn(-__fmaf_rn(quotient, divisor, -value), reciprocal, quotient);
  }

  __device__ __forceinline__ float under(float value) const {
    return corrected(value, corrected(value, __fmul_rn(value, reciprocal)));
  }
};

// The codes of a lane's channels.
__device__ __forceinline__ uint2 codes_of(float (&values)[kChannels], float scale) {
  if (Divisor::takes(scale)) {
    const Divisor divisor(scale);
#pragma unroll
    for (float& value : values) value = divisor.under(value);
  } else {
#pragma unroll
    for (float& value : values) value = __fdiv_rn(value, scale);
  }
  return make_uint2(e4m3_pair(values[0], values[1]) | e4m3_pair(values[2], values[3]) << 16,
                    e4m3_pair(values[4], values[5]) | e4m3_pair(values[6], values[7]) << 16);
}

}  // namespace cupymla::mla_cache
