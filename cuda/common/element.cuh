// The 16-bit type of queries, keys and outputs that a translation unit is compiled for. CUPYMLA_FP16: 1 for fp16, 0
// for bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cupymla {

#if CUPYMLA_FP16
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

}  // namespace cupymla
