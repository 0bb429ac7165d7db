// What a CTA of a sparse MLA kernel works on: which queries, and which entries of a query can be valid. Valid entries
// are defined in the operators' READMEs.
#pragma once

#include "types.cuh"

namespace cupymla {

// Neighbouring queries that one CTA takes: several, so that the gather for the next query hides the end of the last;
// one towards the end of the grid, so that all SMs end together. `index` counts the CTAs of a block of heads.
struct QueryRange {
  uint32_t token, end;  // over all batch entries

  __device__ __forceinline__ QueryRange(uint32_t index, uint32_t groups, uint32_t group_tokens) {
    const bool grouped = index < groups;
    token = grouped ? index * group_tokens : groups * (group_tokens - 1) + index;
    end = token + (grouped ? group_tokens : 1u);
  }
};

// Where a query lies. Parameter records hold the fields that these structs read under their names.
struct QueryPosition {
  int32_t batch, query;

  template <typename Parameters>
  __device__ __forceinline__ QueryPosition(const Parameters& params, uint32_t token)
      : batch(static_cast<int32_t>(token / params.s_q)), query(static_cast<int32_t>(token % params.s_q)) {}
};

// One query, and which of its entries can be valid.
template <int kBlockKeys>
struct SparseQuery : QueryPosition {
  int32_t entries;      // entries that can be valid: min(topk, topk_length)
  int32_t blocks;       // KV blocks that hold them
  uint32_t token_limit; // token t can be valid when (uint32_t)t < token_limit

  template <typename Parameters>
  __device__ __forceinline__ SparseQuery(const Parameters& params, uint32_t token)
      : SparseQuery(params, token, read_entries(params, QueryPosition(params, token))) {}

  // With what `read_entries` gave. Threads that wait for each other must have one answer, whoever writes to topk_length
  // meanwhile.
  template <typename Parameters>
  __device__ __forceinline__ SparseQuery(const Parameters& params, uint32_t token, int32_t entries)
      : QueryPosition(params, token), entries(entries) {
    blocks = (entries + kBlockKeys - 1) / kBlockKeys;

    int64_t limit = params.s_kv;
    if (params.causal != 0) {
      // C's division truncates toward zero, which the operator's definition asks for.
      const int64_t last = (params.q_start + query + 1 - params.k_stride) / params.k_stride;
      limit = min(limit, last + 1);
    }
    token_limit = static_cast<uint32_t>(max(limit, static_cast<int64_t>(0)));
  }

  template <typename Parameters>
  static __device__ __forceinline__ int32_t read_entries(const Parameters& params, const QueryPosition& position) {
    if (params.topk_length == nullptr) return params.topk;
    const int64_t place = position.batch * params.topk_length_batch + position.query * params.topk_length_query;
    return max(0, min(params.topk, params.topk_length[place]));
  }
};

}  // namespace cupymla
