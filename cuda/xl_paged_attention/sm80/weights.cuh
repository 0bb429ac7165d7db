// What scores weigh beside the largest of their row, and parts of a row beside the one with the largest.
#pragma once

#include "../../common/math.cuh"

namespace cupymla::xl_paged_attention {

// 2^x; 0 for -inf. Where the result is fp32 it would show the two units in the last place that ex2.approx may be off
// by, all weights of a row the same way.
template <typename Query>
__device__ __forceinline__ float power(float x) {
  if constexpr (sizeof(Query) == 4) return accurate_exp2(x);
  return exp2_approx(x);
}

}  // namespace cupymla::xl_paged_attention
