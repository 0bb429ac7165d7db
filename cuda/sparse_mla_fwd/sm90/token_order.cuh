// Stage `order`: lists the tokens of each query's valid slots in ascending order, for the attention behind it to take
// in the place of indices and lengths. Queries that began together are then at about the same tokens at any time, and
// find each other's rows in L2. A CTA to a query.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../../common/warp_scan.cuh"
#include "order_params.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32;

struct OrderStorage {
  uint32_t named[kMaxOrderTokens / 32];  // one bit for each token of a valid slot
  int32_t again[kMaxOrderSlots];         // tokens of slots whose bit another slot had set, in the order of chance
  int32_t again_count;
  uint32_t warp_tokens[kOrderWarps];  // tokens that a warp finds in its words
};

struct TokenOrder {
  OrderStorage& storage;
  const OrderParameters& params;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int words;                 // that hold the bits of all tokens
  const int begin, end;            // this warp's, neighbours in whole steps of 32
  int32_t* const list;             // the query's

  __device__ __forceinline__ TokenOrder(OrderStorage& storage, const OrderParameters& params)
      : storage(storage),
        params(params),
        words((params.s_kv + 31) / 32),
        begin(min(warp * warp_words(), words)),
        end(min(begin + warp_words(), words)),
        list(params.lists + static_cast<int64_t>(blockIdx.x) * params.topk) {}

  __device__ __forceinline__ void run() {
    for (int word = static_cast<int>(threadIdx.x); word < words; word += kOrderThreads) storage.named[word] = 0;
    if (threadIdx.x == 0) storage.again_count = 0;
    __syncthreads();
    name_tokens();
    __syncthreads();
    count_tokens();
    __syncthreads();
    const uint32_t tokens = list_tokens();
    list_again(tokens);
    if (threadIdx.x == 0) params.lengths[blockIdx.x] = static_cast<int32_t>(tokens) + storage.again_count;
  }

  __device__ __forceinline__ int warp_words() const {
    return (words + 32 * kOrderWarps - 1) / (32 * kOrderWarps) * 32;
  }

  // Reads every slot once: what another kernel writes to indices or lengths meanwhile changes which tokens are listed,
  // not where, and each slot gives one entry at most.
  __device__ __forceinline__ void name_tokens() {
    const SparseQuery<64> query(params, blockIdx.x);
    const int32_t* const indices =
        params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
    constexpr int kOwn = kMaxOrderSlots / kOrderThreads;
    int32_t tokens[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t slot = i * kOrderThreads + static_cast<int32_t>(threadIdx.x);
      tokens[i] = slot < query.slots ? __ldg(indices + slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (static_cast<uint32_t>(tokens[i]) >= query.token_limit) continue;
      const uint32_t bit = 1u << tokens[i] % 32;
      if ((atomicOr(&storage.named[tokens[i] / 32], bit) & bit) != 0) {
        storage.again[atomicAdd(&storage.again_count, 1)] = tokens[i];
      }
    }
  }

  __device__ __forceinline__ void count_tokens() {
    uint32_t count = 0;
    for (int word = begin + lane; word < end; word += 32) count += __popc(storage.named[word]);
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane == 0) storage.warp_tokens[warp] = count;
  }

  // Lists each token once, and says how many there are.
  __device__ __forceinline__ uint32_t list_tokens() {
    uint32_t place = 0, tokens = 0;
#pragma unroll
    for (int other = 0; other < kOrderWarps; ++other) {
      if (other < warp) place += storage.warp_tokens[other];
      tokens += storage.warp_tokens[other];
    }
    for (int first = begin; first < end; first += 32) {
      const int word = first + lane;
      uint32_t bits = word < end ? storage.named[word] : 0;
      const uint32_t count = __popc(bits), through = warp_scan(count, lane);
      for (uint32_t own = place + through - count; bits != 0; bits &= bits - 1) {
        list[own++] = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      }
      place += __shfl_sync(0xffffffffu, through, 31);
    }
    return tokens;
  }

  // Behind them tokens that are named once more, in their order too: a result must not depend on chance.
  __device__ __forceinline__ void list_again(uint32_t tokens) {
    const int32_t count = storage.again_count;
    for (int32_t own = static_cast<int32_t>(threadIdx.x); own < count; own += kOrderThreads) {
      const int32_t token = storage.again[own];
      int32_t before = 0;
      for (int32_t other = 0; other < count; ++other) {
        before += storage.again[other] < token || (storage.again[other] == token && other < own);
      }
      list[static_cast<int32_t>(tokens) + before] = token;
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
