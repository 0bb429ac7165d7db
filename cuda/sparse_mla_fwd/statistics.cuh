// What the softmax says of one head of a query, and what follows from it. Parameter records hold the fields that these
// functions read under their names.
#pragma once

#include "../common/cluster.cuh"
#include "../common/math.cuh"
#include "../common/sparse_query.cuh"

namespace cupymla::sparse_mla_fwd {

// Over the entries of one CTA, or of all that share a query. The base in units of log2, the sum relative to it; the
// maximum in the units that scores have when it is taken, as a rounding to other units would show in max_logits.
// Whether any entry is valid is told by the entries, not by the maximum: valid entries may all score -inf.
struct RowStatistics {
  float base, maximum, sum;
  bool occupied;
};

// What joining starts from: nothing.
__device__ __forceinline__ RowStatistics no_statistics() {
  return {negative_infinity(), negative_infinity(), 0.f, false};
}

// Base, maximum and occupied of `row` become those of both; sums are joined once the base is known.
__device__ __forceinline__ void join_base(RowStatistics& row, const RowStatistics& other) {
  row.base = max_nan(row.base, other.base);
  row.maximum = max_nan(row.maximum, other.maximum);
  row.occupied |= other.occupied;
}

// How statistics lie in shared memory for the CTAs that share a query.
__device__ __forceinline__ float4 packed(const RowStatistics& row) {
  return make_float4(row.base, row.maximum, row.sum, row.occupied ? 1.f : 0.f);
}

// What the CTA of that rank left where this one has `place`.
__device__ __forceinline__ RowStatistics read_statistics(const float4& place, uint32_t rank) {
  const float4 values = cluster_load_float4(cluster_address(smem_address(&place), rank));
  return {values.x, values.y, values.z, values.w != 0.f};
}

// Base and logarithm of the sum, in units of lse. The base's unit is in two parts, and the sum's power of two is apart
// from its logarithm, which log2f then gives to within much less than a unit of the result: all is exact but for that
// and the last addition.
template <typename Parameters>
__device__ __forceinline__ float log_sum(const Parameters& params, const RowStatistics& row) {
  const uint32_t bits = __float_as_uint(row.sum);
  const bool is_normal = bits - 0x00800000u < 0x7F000000u;
  // To the nearest power: what is left is between the square roots of 1/2 and of 2.
  const int32_t power = is_normal ? static_cast<int32_t>(bits - 0x3F3504F3u) >> 23 : 0;
  const float left = __uint_as_float(bits - (static_cast<uint32_t>(power) << 23));
  const float whole = __fmul_rn(row.base, params.base_unit);
  const float powers = __fmul_rn(static_cast<float>(power), params.lse_unit);
  const float both = __fadd_rn(whole, powers);
  float lost = 0.f;
  if (fabsf(both) < positive_infinity()) {
    const float second = __fsub_rn(both, whole);
    lost = __fadd_rn(__fsub_rn(whole, __fsub_rn(both, second)), __fsub_rn(powers, second));
    lost += fmaf(row.base, params.base_unit_rest, fmaf(row.base, params.base_unit, -whole));
    lost += fmaf(static_cast<float>(power), params.lse_unit, -powers);
  }
  return both + fmaf(log2f(left), params.lse_unit, lost);
}

// Writes lse and max_logits of one head.
template <typename Parameters>
__device__ __forceinline__ void store_statistics(const Parameters& params, const QueryPosition& position, int32_t head,
                                                 const RowStatistics& row) {
  const int64_t batch = position.batch, query = position.query;
  params.max_logits[batch * params.max_logits_batch + query * params.max_logits_query +
                    head * params.max_logits_head] = row.maximum * params.max_unit;
  params.lse[batch * params.lse_batch + query * params.lse_query + head * params.lse_head] =
      row.occupied ? log_sum(params, row) : positive_infinity();
}

// What turns the output accumulated relative to the base into the result; `empty` for a query without a valid entry.
template <typename Parameters>
__device__ __forceinline__ float output_factor(const Parameters& params, int32_t head, const RowStatistics& row,
                                               float empty) {
  float total = row.sum;
  if (params.attn_sink != nullptr && head < params.h_q) {
    total += exp2f(params.attn_sink[head * params.attn_sink_head] * kLog2e - row.base);
  }
  return row.occupied ? 1.f / total : empty;
}

}  // namespace cupymla::sparse_mla_fwd
