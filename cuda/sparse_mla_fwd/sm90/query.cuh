// What one CTA works on: a block of heads of one query, and which of its slots can be valid.
#pragma once

#include "config.cuh"
#include "params.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config>
struct Query {
  int32_t batch, query, first_head;
  int32_t slots;        // slots that can be valid: min(topk, topk_length)
  int32_t blocks;       // KV blocks that hold them
  uint32_t token_limit; // token t can be valid when (uint32_t)t < token_limit

  __device__ __forceinline__ explicit Query(const Parameters& params) {
    // Head blocks of a query are neighbours, so that the second finds the gathered rows in L2.
    const uint32_t token = blockIdx.x / params.head_blocks;
    first_head = static_cast<int32_t>(blockIdx.x % params.head_blocks) * Config::kHeads;
    batch = static_cast<int32_t>(token / params.s_q);
    query = static_cast<int32_t>(token % params.s_q);

    slots = params.topk;
    if (params.topk_length != nullptr) {
      const int32_t length =
          params.topk_length[batch * params.topk_length_batch + query * params.topk_length_query];
      slots = max(0, min(slots, length));
    }
    blocks = (slots + Config::kSlots - 1) / Config::kSlots;

    int64_t limit = params.s_kv;
    if (params.causal != 0) {
      // C's division truncates toward zero, which the operator's definition asks for.
      const int64_t last = (params.q_start + query + 1 - params.k_stride) / params.k_stride;
      limit = min(limit, last + 1);
    }
    token_limit = static_cast<uint32_t>(max(limit, static_cast<int64_t>(0)));
  }
};

}  // namespace cupymla::sparse_mla_fwd
