// Stage `round`: makes dk of the sums.
#pragma once

#include "../../common/math.cuh"
#include "channels.cuh"
#include "fixed_point.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace cupymla::indexer_bwd {

// A channel of integer sums, unless infinities were added.
__device__ __forceinline__ float channel_of(int32_t sum, double unit, uint32_t positive, uint32_t negative) {
  if ((positive | negative) == 0) return static_cast<float>(static_cast<double>(sum) * unit);
  if (negative == 0) return positive_infinity();
  return positive == 0 ? negative_infinity() : __int_as_float(0x7fffffff);
}

// Four channels of a row of sums.
template <bool kDeterministic>
__device__ __forceinline__ float4 four_sums(const Parameters& params, int64_t row, int channel) {
  const int64_t element = row * kD + channel;
  if constexpr (!kDeterministic) return *reinterpret_cast<const float4*>(params.sums + element * 4);
  const int4 joined = *reinterpret_cast<const int4*>(params.sums + element * 4);
  const int2 low = separated(joined.x, joined.y), high = separated(joined.z, joined.w);
  const int64_t batch = row / params.keys;
  const int units = units_log2(params.totals[row], total_unit_log2(params.largest[batch], params.adds_log2),
                               params.adds_log2);
  const float4 parts = *reinterpret_cast<const float4*>(params.channel_parts + batch * kD + channel);
  const uint32_t* words = params.non_finite + element / 32 * 2;
  const uint32_t positive = words[0] >> (channel % 32), negative = words[1] >> (channel % 32);
  const auto unit = [units](float part) { return wide_power_of_two(-units - channel_log2(part)); };
  return make_float4(channel_of(low.x, unit(parts.x), positive & 1u, negative & 1u),
                     channel_of(low.y, unit(parts.y), positive & 2u, negative & 2u),
                     channel_of(high.x, unit(parts.z), positive & 4u, negative & 4u),
                     channel_of(high.y, unit(parts.w), positive & 8u, negative & 8u));
}

// kDeterministic: whether sums are of integers.
template <bool kDeterministic>
__device__ __forceinline__ void round(const Parameters& params) {
  const int64_t chunks = static_cast<int64_t>(params.batch) * params.keys * (kD / 4);
  for (int64_t chunk = first_thread(); chunk < chunks; chunk += all_threads()) {
    const int64_t row = chunk / (kD / 4);
    const int channel = static_cast<int>(chunk % (kD / 4)) * 4;
    const float4 four = four_sums<kDeterministic>(params, row, channel);
    const int64_t place = row / params.keys * params.dk_batch + row % params.keys * params.dk_key + channel;
    uint8_t* to = params.dk + place * (params.dk_type == 2 ? 4 : 2);
    if (params.dk_type == 2) {
      *reinterpret_cast<float4*>(to) = four;
    } else if (params.dk_type == 1) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__half>(four.x, four.y), pack_pair<__half>(four.z, four.w));
    } else {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__nv_bfloat16>(four.x, four.y), pack_pair<__nv_bfloat16>(four.z, four.w));
    }
  }
}

}  // namespace cupymla::indexer_bwd
