// What the softmax says of one head, and what follows from it.
#pragma once

#include "../../common/math.cuh"
#include "../../common/sparse_query.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

// Base and maximum in units of log2, the sum relative to the base. Queries without a valid slot are told by their
// slots, not by the maximum: valid slots may all score -inf.
struct RowStatistics {
  float base, maximum, sum;
  bool occupied;
};

// Writes lse and max_logits of one head.
__device__ __forceinline__ void store_statistics(const Parameters& params, const QueryPosition& position, int32_t head,
                                                 const RowStatistics& row) {
  const int64_t batch = position.batch, query = position.query;
  params.max_logits[batch * params.max_logits_batch + query * params.max_logits_query +
                    head * params.max_logits_head] = row.maximum * kLn2;
  params.lse[batch * params.lse_batch + query * params.lse_query + head * params.lse_head] =
      row.occupied ? (row.base + log2f(row.sum)) * params.lse_unit : positive_infinity();
}

// What turns the output accumulated relative to the base into the result; negative for a query without a valid slot,
// whose output is 0.
__device__ __forceinline__ float output_factor(const Parameters& params, int32_t head, const RowStatistics& row) {
  float total = row.sum;
  if (params.attn_sink != nullptr && head < params.h_q) {
    total += exp2f(params.attn_sink[head * params.attn_sink_head] * kLog2e - row.base);
  }
  return row.occupied ? 1.f / total : -1.f;
}

}  // namespace cupymla::sparse_mla_fwd
