// The cache's dtype, which a kernel is compiled for (mirrored: `CACHE_CODE` in cupymla/ops/xl_paged_attention/plan.py).
// CUPYMLA_CACHE: 0 for the query's, 43 for e4m3, 52 for e5m2.
#pragma once

#include "../../common/fp8_fp4.cuh"
#include "query_type.cuh"

namespace cupymla::xl_paged_attention {

#if CUPYMLA_CACHE == 43
using ThisCache = E4m3;
#elif CUPYMLA_CACHE == 52
using ThisCache = E5m2;
#else
using ThisCache = ThisQuery;
#endif

}  // namespace cupymla::xl_paged_attention
