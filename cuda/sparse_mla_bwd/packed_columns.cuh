// Eight float32 columns of a row in sixteen bytes: what an entry adds to dKV, where it is stored on its own and dKV has
// 16 bits (CUPYMLA_PARTIALS 2).
//
// The eight share an exponent, that of the largest, and are whole numbers of 15 bits, from -2^14 on: off by 2^-15 to
// 2^-14 of the largest at most, where bfloat16 would be off by 2^-9 of each. A field of 16 bits has one bit of the
// exponent:
//
//   word i   bit 31      bits 30-16           bit 15   bits 14-0
//            e[4 + i]    column 2 * i + 1     e[i]     column 2 * i
//
// e = 255: a column is not finite, or would round up to 2^128. Then a field has the sign, the exponent and six bits of
// the mantissa of a float32, the rest cut off. (Of NaN there are what arithmetic makes, which have bits there.)
#pragma once

#include "../common/types.cuh"
#include "../common/math.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kPackedColumns = 8;
constexpr uint32_t kPackedFields = 0x7fff7fffu;
constexpr uint32_t kPackedNotFinite = 255;
constexpr float kPackedZero = 16384.f;  // what stands for 0
// Two columns of it, in any word. Their exponent is 0, which stands for a finite scale.
constexpr uint32_t kPackedZeros = 0x40004000u;
// The smallest exponent that is told: below, what brings whole numbers back is no normal float32. Columns of 2^-127 and
// less become zero.
constexpr uint32_t kPackedLeast = 14;

// The bits of the exponent where fields leave room for those of word 0; of word `i` a shift to the right further down.
__device__ __forceinline__ uint32_t spread_exponent(uint32_t exponent) {
  return (exponent & 0xfu) << 12 | (exponent >> 4) << 28;
}

__device__ __forceinline__ uint32_t with_exponent(uint32_t fields, uint32_t spread, int word) {
  return (fields & kPackedFields) | (spread << (3 - word) & ~kPackedFields);
}

// The exponent that columns have in common: of the largest, and half of the last place more, as that may be rounded up
// to the next power of two.
__device__ __forceinline__ uint32_t shared_exponent(const float (&columns)[kPackedColumns]) {
  float pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = max_nan(fabsf(columns[2 * i]), fabsf(columns[2 * i + 1]));
  const float largest = max_nan(max_nan(pairs[0], pairs[1]), max_nan(pairs[2], pairs[3]));
  return max((__float_as_uint(largest) + 0x200u) >> 23, kPackedLeast);
}

// To whole numbers by a power of two, and rounded by what is too large to have a fraction; zero is 2^14 then.
__device__ __forceinline__ uint4 pack_finite(const float (&columns)[kPackedColumns], uint32_t exponent) {
  constexpr float kLarge = 12582912.f + kPackedZero;
  const float scale = __uint_as_float((267u - exponent) << 23);
  const uint32_t spread = spread_exponent(exponent);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = __float_as_uint(fmaf(columns[2 * i], scale, kLarge));
    const uint32_t high = __float_as_uint(fmaf(columns[2 * i + 1], scale, kLarge));
    words[i] = with_exponent(__byte_perm(low, high, 0x5410), spread, i);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// What is not finite, or has too large an exponent, by its upper bits.
__device__ __forceinline__ uint4 pack_not_finite(const float (&columns)[kPackedColumns]) {
  const uint32_t spread = spread_exponent(kPackedNotFinite);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = __float_as_uint(columns[2 * i]) >> 17, high = __float_as_uint(columns[2 * i + 1]) >> 17;
    words[i] = with_exponent(__byte_perm(low, high, 0x5410), spread, i);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 pack_columns(const float (&columns)[kPackedColumns]) {
  const uint32_t exponent = shared_exponent(columns);
  return exponent < kPackedNotFinite ? pack_finite(columns, exponent) : pack_not_finite(columns);
}

// Several eights at once, one branch for all: what is rare stands aside, and the rest can be interleaved.
template <int kCount>
__device__ __forceinline__ void pack_eights(const float (&columns)[kCount][kPackedColumns], uint4 (&packed)[kCount]) {
  uint32_t exponents[kCount], highest = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    exponents[n] = shared_exponent(columns[n]);
    highest = max(highest, exponents[n]);
  }
  if (highest < kPackedNotFinite) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) packed[n] = pack_finite(columns[n], exponents[n]);
  } else {
#pragma unroll
    for (int n = 0; n < kCount; ++n) packed[n] = pack_columns(columns[n]);
  }
}

// `pack_columns` without a branch, for where products are under way: what is not finite goes the same way, by one and
// zero in the place of the power of two and of what rounds, and leaves its upper bits in the place of its lower ones.
__device__ __forceinline__ uint4 pack_by_selects(const float (&columns)[kPackedColumns]) {
  const uint32_t exponent = min(shared_exponent(columns), kPackedNotFinite);
  // By arithmetic: of a choice between constants one would be kept in a register.
  const uint32_t shift = (exponent + 1) >> 8;  // 1 where there is a column that is not finite
  const float scale = __uint_as_float((267u - exponent + shift * (127 - 12)) << 23);
  const float large = shift != 0 ? 0.f : 12582912.f + kPackedZero;
  const uint32_t halves = 0x5410u + shift * (0x7632u - 0x5410u);
  const uint32_t spread = spread_exponent(exponent);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = __float_as_uint(fmaf(columns[2 * i], scale, large));
    const uint32_t high = __float_as_uint(fmaf(columns[2 * i + 1], scale, large));
    words[i] = with_exponent(__byte_perm(low, high, halves) >> shift, spread, i);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The exponent of packed columns, as `spread_exponent` leaves it.
__device__ __forceinline__ uint32_t packed_spread(const uint4& packed) {
  return (packed.x >> 3 & 0x10001000u) | (packed.y >> 2 & 0x20002000u) | (packed.z >> 1 & 0x40004000u) |
         (packed.w & 0x80008000u);
}

__device__ __forceinline__ bool packed_is_finite(const uint4& packed) {
  return packed_spread(packed) != spread_exponent(kPackedNotFinite);
}

// Adds columns that are finite.
__device__ __forceinline__ void add_finite_columns(float (&sums)[kPackedColumns], const uint4& packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  const uint32_t spread = packed_spread(packed);
  const float scale = __uint_as_float((spread << 11 | (spread >> 1 & 0x78000000u)) - (13u << 23));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t fields = words[i] & kPackedFields;
    // 2^23 has a field as its last bits.
    const float low = __uint_as_float(__byte_perm(fields, 0x4b000000u, 0x7610)) - (8388608.f + kPackedZero);
    const float high = __uint_as_float(__byte_perm(fields, 0x4b000000u, 0x7632)) - (8388608.f + kPackedZero);
    sums[2 * i] = fmaf(low, scale, sums[2 * i]);
    sums[2 * i + 1] = fmaf(high, scale, sums[2 * i + 1]);
  }
}

__device__ __forceinline__ void add_packed_columns(float (&sums)[kPackedColumns], const uint4& packed) {
  if (packed_is_finite(packed)) {
    add_finite_columns(sums, packed);
    return;
  }
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < kPackedColumns; ++i) {
    sums[i] += __uint_as_float(words[i / 2] >> (i % 2 * 16) << 17);
  }
}

}  // namespace cupymla::sparse_mla_bwd
