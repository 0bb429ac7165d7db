// How many keys a query sees.
#pragma once

#include "params.cuh"

namespace cupymla::paged_indexer {

// Of one query.
__device__ __forceinline__ int32_t seen_keys(const Paged& paged, int64_t request, int32_t query) {
  const int32_t* lens = paged.context_lens + request * paged.lens_request;
  const int64_t length =
      paged.lens_by_query != 0 ? lens[query * paged.lens_query] : int64_t{lens[0]} - paged.queries + 1 + query;
  return length < 0 ? 0 : length < paged.columns ? static_cast<int32_t>(length) : paged.columns;
}

// Of that query of a request which sees most.
__device__ __forceinline__ int32_t most_seen_keys(const Paged& paged, int64_t request) {
  int32_t most = 0;
  // From the last one on, which without lengths of their own is the only one to look at.
  const int32_t last = paged.lens_by_query != 0 ? 0 : paged.queries - 1;
#pragma unroll 1
  for (int32_t query = paged.queries - 1; query >= last; --query) most = max(most, seen_keys(paged, request, query));
  return most;
}

}  // namespace cupymla::paged_indexer
