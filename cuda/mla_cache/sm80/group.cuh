// A group of channels with one scale, sixteen in each of neighbouring lanes: its largest magnitude, and its codes.
// `dispatch_type` chooses a loop by the type of what is read.
#pragma once

#include "../../common/reciprocal.cuh"
#include "e4m3.cuh"
#include "floats.cuh"
#include "wide.cuh"

namespace cupymla::mla_cache {

constexpr int kLaneChannels = 16;  // of a lane: 16 bytes of codes

// The largest finite number of a type: an infinity counts as it.
__device__ __forceinline__ float largest(int32_t type) {
  return type == kFloat16 ? 65504.0f : __uint_as_float(type == kBfloat16 ? 0x7f7f0000u : 0x7f7fffffu);
}

// Runs `Loop` of the FloatType that the parameters have: each type has machine code of its own.
template <template <int32_t> class Loop, typename Parameters>
__device__ __forceinline__ void dispatch_type(const Parameters& params) {
  if (params.type == kBfloat16) {
    Loop<kBfloat16>::run(params);
  } else if (params.type == kFloat16) {
    Loop<kFloat16>::run(params);
  } else {
    Loop<kFloat32>::run(params);
  }
}

// Neighbouring channels as they are in memory, all asked for at once. If `kAligned`, their address is a multiple of 16.
template <int32_t kType, bool kAligned, int kCount>
struct Loaded {
  static constexpr int kWords = kType == kFloat32 ? kCount : kCount / 2;
  uint32_t words[kWords] = {};

  __device__ __forceinline__ void load(const uint8_t* source) {
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 vector = __ldg(reinterpret_cast<const uint4*>(source) + i / 4);
        words[i] = vector.x, words[i + 1] = vector.y, words[i + 2] = vector.z, words[i + 3] = vector.w;
      }
    } else if constexpr (kType == kFloat32) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = __ldg(reinterpret_cast<const uint32_t*>(source) + i);
    } else {
      const uint16_t* const halves = reinterpret_cast<const uint16_t*>(source);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = __ldg(halves + 2 * i) | static_cast<uint32_t>(__ldg(halves + 2 * i + 1)) << 16;
      }
    }
  }

  __device__ __forceinline__ float value(int i) const {
    if constexpr (kType == kFloat32) return __uint_as_float(words[i]);
    const uint32_t pair = words[i / 2];
    if constexpr (kType == kBfloat16) return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    return widened(i % 2 == 0 ? pair & 0xffffu : pair >> 16, kType);
  }

  __device__ __forceinline__ void widen(float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = value(i);
  }
};

// Sixteen bytes to an address of a multiple of `kAlignment`.
template <int kAlignment>
__device__ __forceinline__ void store_vector(uint8_t* target, uint4 words) {
  if constexpr (kAlignment == 16) {
    *reinterpret_cast<uint4*>(target) = words;
  } else if constexpr (kAlignment == 8) {
    reinterpret_cast<uint2*>(target)[0] = make_uint2(words.x, words.y);
    reinterpret_cast<uint2*>(target)[1] = make_uint2(words.z, words.w);
  } else {
    store_wide(target, words);
  }
}

// The largest magnitude of a group, by all its lanes, 2^kMostLog2 or fewer; NaN is passed over.
template <int kMostLog2>
__device__ __forceinline__ float largest_magnitude(const float (&values)[kLaneChannels], int lanes) {
  float parts[4];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    parts[i % 4] = i < 4 ? fabsf(values[i]) : fmaxf(parts[i % 4], fabsf(values[i]));
  }
  float most = fmaxf(fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3])), 0.0f);
  // Past the group's lanes the distance is 0: a lane's own number.
#pragma unroll
  for (int i = 0; i < kMostLog2; ++i) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1 << i & (lanes - 1)));
  }
  return most;
}

// Quotients by one positive number from 2^-64 to 2^64: a product with its reciprocal, corrected by the remainder, which
// FMA gives exactly (P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
// Remainders have their sign turned, which keeps the sign of zero. Two corrections round a quotient as IEEE 754 has it.
// One, with any reciprocal within two units in the last place, gives 16-bit numbers the same code: tried for each pair
// of a number and a largest magnitude. Quotients below 2^-11 may be off: their code is 0 anyway.
template <int32_t kType>
struct Divisor {
  const float divisor;
  float reciprocal;

  __device__ __forceinline__ explicit Divisor(float divisor)
      : divisor(divisor), reciprocal(reciprocal_approx(divisor)) {
    if constexpr (kType == kFloat32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reciprocal = __fmaf_rn(__fmaf_rn(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
      }
    }
  }

  __device__ __forceinline__ float under(float value) const {
    const float quotient = corrected(value, __fmul_rn(value, reciprocal), divisor, reciprocal);
    return kType == kFloat32 ? corrected(value, quotient, divisor, reciprocal) : quotient;
  }
};

// The codes of a lane's channels by their group's scale; infinities count as the largest number.
template <int32_t kType>
__device__ __forceinline__ uint4 codes_of(float (&values)[kLaneChannels], float amax, float scale) {
  if (amax > 0x1p64f || scale < 0x1p-64f) {  // powers of two leave quotients as they are
    const float factor = amax > 1.0f ? 0x1p-64f : 0x1p64f;
#pragma unroll
    for (float& value : values) {
      value = __fmul_rn(fabsf(value) > largest(kType) ? copysignf(largest(kType), value) : value, factor);
    }
    scale *= factor;
  }
  const Divisor<kType> divisor(scale);
  uint32_t words[kLaneChannels / 4];
#pragma unroll
  for (int i = 0; i < kLaneChannels / 4; ++i) {
    words[i] = e4m3_pair(divisor.under(values[4 * i]), divisor.under(values[4 * i + 1])) |
               e4m3_pair(divisor.under(values[4 * i + 2]), divisor.under(values[4 * i + 3])) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace cupymla::mla_cache
