// Conversions and reductions of sm_100, in software (PTX ISA 9.0, "cvt", "redux.sync", "st.bulk").
#pragma once

#include <cuda_bf16.h>

#include "elements.cuh"
#include "failure.cuh"

namespace cupymla::emulate {

// The numbers of cupymla_lab/emulate/lower_math.py.
enum Format : uint32_t {
  kToE2m1 = 1, kToE2m3, kToE3m2, kToE4m3, kToE5m2, kToUe8m0, kToF16, kToBf16, kToF32,
};
enum Rounding : uint32_t { kNearest = 0, kTowardsZero, kUp, kStochastic };

struct Conversion {
  Format to, from;
  uint32_t count;
  Rounding rounding;
  bool relu, saturate;

  __device__ __forceinline__ explicit Conversion(uint32_t word)
      : to(static_cast<Format>(word & 15)), from(static_cast<Format>(word >> 4 & 15)), count(word >> 8 & 15),
        rounding(static_cast<Rounding>(word >> 12 & 3)), relu(word >> 14 & 1), saturate(word >> 15 & 1) {}
};

struct FloatLayout {
  int exponent_bits, mantissa_bits, bias;
  bool has_infinity, has_nan;
  uint32_t largest;  // encoding of the largest finite magnitude
};

__device__ __forceinline__ FloatLayout layout_of(Format format) {
  switch (format) {
    case kToE2m1: return {2, 1, 1, false, false, 0x7};
    case kToE2m3: return {2, 3, 1, false, false, 0x1f};
    case kToE3m2: return {3, 2, 3, false, false, 0x1f};
    case kToE4m3: return {4, 3, 7, false, true, 0x7e};
    case kToE5m2: return {5, 2, 15, true, true, 0x7b};
    case kToF16: return {5, 10, 15, true, true, 0x7bff};
    default: return {8, 7, 127, true, true, 0x7f7f};
  }
}

// A non-negative number as an integer of the target's steps: rounds what lies below the last mantissa bit.
__device__ __forceinline__ double rounded(double steps, Rounding rounding, double noise) {
  if (rounding == kNearest) return rint(steps);
  if (rounding == kStochastic) return floor(steps + noise);
  return rounding == kUp ? ceil(steps) : floor(steps);
}

__device__ __forceinline__ uint32_t encode(float value, const Conversion& how, Format format, double noise) {
  const FloatLayout layout = layout_of(format);
  const uint32_t sign_bit = 1u << (layout.exponent_bits + layout.mantissa_bits);
  const bool nan = value != value;
  if (how.relu && (nan ? false : value < 0.0f)) value = 0.0f;
  if (nan) {
    if (format == kToF16 || format == kToBf16) return 0x7fff;
    return format == kToE4m3 || format == kToE5m2 ? 0x7f : layout.largest;
  }
  const uint32_t sign = signbit(value) && !(how.relu && value == 0.0f) ? sign_bit : 0;
  const double magnitude = fabs(static_cast<double>(value));
  const uint32_t beyond = how.saturate || !layout.has_infinity ? layout.largest : layout.largest + 1;
  if (isinf(magnitude)) return sign | beyond;
  if (magnitude == 0) return sign;
  int exponent = ilogb(magnitude);
  if (exponent < 1 - layout.bias) exponent = 1 - layout.bias;
  const double steps = rounded(ldexp(magnitude, layout.mantissa_bits - exponent), how.rounding, noise);
  // Rounding may carry into the exponent; the encodings of neighbouring numbers are neighbouring integers.
  const uint32_t word =
      (static_cast<uint32_t>(exponent + layout.bias - 1) << layout.mantissa_bits) + static_cast<uint32_t>(steps);
  return sign | (word > layout.largest ? beyond : word);
}

__device__ __forceinline__ uint32_t encode_ue8m0(float value, const Conversion& how) {
  if (value != value) return 0xff;
  const double magnitude = fabs(static_cast<double>(value));
  if (isinf(magnitude)) return how.saturate ? 0xfe : 0xff;
  if (magnitude == 0) return 0;
  int exponent = ilogb(magnitude);
  if (how.rounding == kUp && ldexp(1.0, exponent) < magnitude) ++exponent;
  if (exponent < -127) return 0;
  return exponent > 127 ? (how.saturate ? 0xfe : 0xff) : static_cast<uint32_t>(exponent + 127);
}

__device__ __forceinline__ float decode(Format format, uint32_t word) {
  switch (format) {
    case kToE2m1: return number(kElementE2m1, word & 15);
    case kToE2m3: return number(kElementE2m3, word & 63);
    case kToE3m2: return number(kElementE3m2, word & 63);
    case kToE4m3: return number(kElementE4m3, word & 255);
    case kToE5m2: return number(kElementE5m2, word & 255);
    case kToUe8m0: return static_cast<float>(scale_factor(word & 255, true));
    case kToF16: return number(kElementF16, word & 0xffff);
    case kToBf16: return number(kElementBf16, word & 0xffff);
    default: return __uint_as_float(word);
  }
}

__device__ __forceinline__ uint32_t width_of(Format format) {
  return format == kToE2m1 ? 4 : format == kToF16 || format == kToBf16 ? 16 : format == kToF32 ? 32 : 8;
}

// Packed results have the first source in their highest bits; a packed source is one word.
__device__ __noinline__ uint32_t convert(uint32_t flags, const uint32_t* sources, uint32_t random) {
  const Conversion how(flags);
  const bool packed = how.from != kToF32;
  uint32_t result = 0;
  for (uint32_t i = 0; i < how.count; ++i) {
    const uint32_t word = packed ? sources[0] >> (width_of(how.from) * i) : sources[how.count - 1 - i];
    const float value = decode(how.from, word);
    uint32_t piece = 0;
    if (how.to == kToUe8m0) {
      piece = encode_ue8m0(value, how);
    } else {
      // Random bits in steps below the last mantissa bit; each result uses its own share of them.
      const uint32_t share = how.count == 2 ? random >> (16 * i) & 0xffffu : random >> (8 * i) & 0xffu;
      const double noise = how.count == 2 ? share / 65536.0 : share / 256.0;
      piece = encode(value, how, how.to, noise);
    }
    result |= piece << (width_of(how.to) * i);
  }
  return result;
}

__device__ __forceinline__ float reduce_two(float a, float b, bool largest, bool nan) {
  if (a != a || b != b) return nan ? quiet_nan() : a != a ? b : a;
  return largest ? fmaxf(a, b) : fminf(a, b);
}

// redux.sync over the lanes of `mask`: bit 0 of the flags for max, 1 for absolute values, 2 to let NaN through.
__device__ __noinline__ uint32_t reduce_floats(uint32_t word, uint32_t mask, uint32_t flags) {
  float result = 0;
  bool first = true;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    float value = __uint_as_float(__shfl_sync(mask, word, static_cast<int>(lane)));
    if (flags & 2) value = fabsf(value);
    result = first ? value : reduce_two(result, value, flags & 1, flags & 4);
    first = false;
  }
  return __float_as_uint(result);
}

}  // namespace cupymla::emulate
