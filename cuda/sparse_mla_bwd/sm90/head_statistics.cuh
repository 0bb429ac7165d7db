// What is known of a head before its first block: delta, and what lse and the sink make of the softmax.
#pragma once

#include "../../common/math.cuh"
#include "../../common/memory.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/swizzle.cuh"
#include "../sink.cuh"

namespace cupymla::sparse_mla_bwd {

struct HeadSoftmax {
  Log2Lse lse{positive_infinity(), 1.f};
  float share = 1.f;  // what the sink leaves
};

__device__ __forceinline__ HeadSoftmax head_softmax(const Parameters& params, const QueryPosition& query,
                                                    int32_t head) {
  const float given = read_lse(params, query, head);
  return {log2_lse(given, params.unit, params.unit_rest), share_beside_sink(params, head, given)};
}

__device__ __forceinline__ const uint8_t* head_out(const Parameters& params, const QueryPosition& query, int32_t head) {
  const int64_t batch = query.batch, token = query.query;
  return params.out + batch * params.out_batch_bytes + token * params.out_query_bytes + head * params.out_head_bytes;
}

// Brings a head's out into L2, by as many threads as it has: while dO is waited for there are no registers to ask for
// all of it at once.
template <int kThreads, int kColumns>
__device__ __forceinline__ void prefetch_head_out(const uint8_t* out, int part) {
#pragma unroll
  for (int line = 0; line < kColumns * 2 / 128 / kThreads; ++line) prefetch_l2(out + (line * kThreads + part) * 128);
}

// A thread's part of out * dO, by as many threads as a head has: every so many 16 bytes. dO is in shared memory.
template <typename Element, int kThreads, int kColumns, int kUnroll, int kTileBytes>
__device__ __forceinline__ float delta_part(const uint8_t* out, const uint8_t (*dout)[kTileBytes], int row, int part) {
  float delta = 0.f;
#pragma unroll kUnroll
  for (int i = 0; i < kColumns / 8 / kThreads; ++i) {
    const int chunk = i * kThreads + part;
    const uint4 left = __ldg(reinterpret_cast<const uint4*>(out) + chunk);
    const uint4 right = *reinterpret_cast<const uint4*>(dout[chunk / 8] + swizzle_128(row, chunk % 8));
    delta += dot_eight<Element>(left, right);
  }
  return delta;
}

template <typename Storage>
__device__ __forceinline__ void store_statistics(Storage& storage, int row, const HeadSoftmax& softmax, float delta) {
  storage.lse[row] = softmax.lse.rounded;
  storage.factor[row] = softmax.lse.factor;
  storage.share[row] = softmax.share * softmax.lse.factor;
  storage.delta[row] = delta;
}

}  // namespace cupymla::sparse_mla_bwd
