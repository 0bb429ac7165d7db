// Where P and dS of all slots lie between the halves of the attention: of each query that there is room for, pass, block
// of 64 slots and either group of 64 heads, a tile of P and one of dS, swizzled as they lie in shared memory.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../params.cuh"

namespace cupymla::sparse_mla_bwd {

constexpr int kScoreTileBytes = 64 * 128;
constexpr int kPassGroups = 2;  // groups of 64 heads whose gradients are made at a time

// Of one pass and block: both groups, P before dS.
__device__ __forceinline__ uint8_t* stored_scores(const Parameters& params, const QueryPosition& query, int32_t pass,
                                                  int32_t block) {
  const int64_t place = static_cast<uint32_t>(query.batch * params.s_q + query.query) % params.score_room;
  const int64_t blocks = (params.topk - 1) / 64 + 1;
  return params.scores + ((place * params.passes + pass) * blocks + block) * (kPassGroups * 2 * kScoreTileBytes);
}

}  // namespace cupymla::sparse_mla_bwd
