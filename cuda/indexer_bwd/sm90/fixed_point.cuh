// Sums that do not depend on the order of their terms: 32-bit integers, in units that bounds fix.
//
//   query bound    max over channels of sum_h |w_h q_hc|; times |gradient| it bounds what an entry adds to a channel
//   channel part   the largest, over queries, of sum_h |w_h q_hc| / query bound
//   largest        the bound of any entry of this batch entry; with `kTotalBits` it fixes the unit of totals
//   total          of a key: the sum of its entries' bounds, each rounded up
//
// What all entries add to a channel of a key is at most total * channel part, so its sum fits if 2^31 units are more.
// All of these are sums of integers or maxima, so they are the same in every order too. What is not finite is left out
// of them: what is added of it is not finite either, and has its own bits.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"

namespace cupymla::indexer_bwd {

constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kSafe = 0x1p126f;  // entries with bounds below it add finite numbers
// A total of 2^adds_log2 entries keeps to 2^62: an entry's bound may be four times the largest that a float holds.
constexpr int kTotalBits = 60;

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) <= kLargestFloat; }

__device__ __forceinline__ int exponent_of(float value) {
  return static_cast<int>(__float_as_uint(value) >> 23 & 255u) - 127;
}

// floor(log2(value)) of a normal double that is not negative.
__device__ __forceinline__ int wide_exponent_of(double value) {
  return static_cast<int>(__double_as_longlong(value) >> 52) - 1023;
}

// 2^exponent, which is a normal double.
__device__ __forceinline__ double wide_power_of_two(int exponent) {
  return __longlong_as_double(static_cast<long long>(1023 + exponent) << 52);
}

// A double that is not negative, between 2^-126 and 2^129; what is no number becomes the larger. Positive doubles have
// the order of their upper words, and those of the limits are all that the limits have.
__device__ __forceinline__ double within_floats(double value) {
  constexpr int kLeast = (1023 - 126) << 20, kMost = (1023 + 129) << 20;
  const int high = __double2hiint(value);
  const bool inside = static_cast<uint32_t>(high - kLeast) < static_cast<uint32_t>(kMost - kLeast);
  return __hiloint2double(min(max(high, kLeast), kMost), inside ? __double2loint(value) : 0);
}

// The largest that an entry adds to any channel, by its query's bound, whose sign says nothing here. Near the end of
// floats the bound was capped, and heads may come in two blocks. Below normal floats, rounding may be of any size.
__device__ __forceinline__ double entry_bound(float gradient, float query_bound) {
  const double most = fabs(static_cast<double>(query_bound));
  const double bound = fabs(static_cast<double>(gradient)) * (most < kSafe ? most : most * 2.0);
  return within_floats(bound);
}

// log2 of the unit of totals.
__device__ __forceinline__ int total_unit_log2(float largest, int adds_log2) {
  return exponent_of(largest) - (kTotalBits - adds_log2);
}

// log2 of how many units a 1 is, in channels of part 1. Of a total, 2^-6 is for the rounding of operands and bounds;
// and 2^(adds_log2 - 29), at most 1, for up to two terms of an entry that are rounded to units.
__device__ __forceinline__ int units_log2(int64_t total, int total_unit, int adds_log2) {
  const uint64_t sum = static_cast<uint64_t>(total), most = sum + (sum >> 6) + (sum >> (29 - adds_log2)) + 1;
  return 30 - (63 - __clzll(static_cast<long long>(most)) + total_unit);
}

// log2 of how many times more units a 1 is in this channel; a part is at most 1. 126 for parts below normal floats.
__device__ __forceinline__ int channel_log2(float part) { return max(0, -1 - exponent_of(part)); }

// Two neighbouring sums of 32 bits in one of 64, which one addition adds to. The first's carry goes into the second; it
// is taken back when they are read.
__device__ __forceinline__ int64_t joined(int2 pair) {
  const uint32_t high = static_cast<uint32_t>(pair.y) + static_cast<uint32_t>(pair.x >> 31);
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(pair.x));
}

__device__ __forceinline__ int2 separated(int32_t low, int32_t high) {
  return make_int2(low, static_cast<int32_t>(static_cast<uint32_t>(high) + (static_cast<uint32_t>(low) >> 31)));
}

}  // namespace cupymla::indexer_bwd
