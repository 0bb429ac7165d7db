// The query's dtype, which a kernel is compiled for (mirrored: `QUERY_CODE` in cupymla/ops/xl_paged_attention/plan.py).
// CUPYMLA_QUERY: 32 for fp32, 16 for fp16, 0 for bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace cupymla::xl_paged_attention {

#if CUPYMLA_QUERY == 32
using ThisQuery = float;
#elif CUPYMLA_QUERY == 16
using ThisQuery = __half;
#else
using ThisQuery = __nv_bfloat16;
#endif

}  // namespace cupymla::xl_paged_attention
