// Stage `order`: lists the tokens of each query's valid entries in ascending order, for the attention behind it to take
// in the place of indices and lengths. Queries that began together are then at about the same tokens at any time, and
// find each other's rows in L2. A CTA to a query.
//
// A bit for each token says which are named. Tokens ahead of each word's first are counted, so that every entry knows
// its token's place: nothing is sorted. Instructions and banks bind this stage (README.md), hence words in fours, a
// thread's neighbours so far apart that a warp's are in different banks, and no loop over bits.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../../common/warp.cuh"
#include "order_params.cuh"

namespace cupymla::sparse_mla_fwd {

constexpr int kOrderThreads = 256, kOrderWarps = kOrderThreads / 32;
// Bytes of shared memory for each word of bits, behind OrderStorage, its bits and how many tokens are ahead of them. A
// thread has a power of two of words in fours.
constexpr int kOrderWordBytes = sizeof(uint32_t) + sizeof(uint16_t);
constexpr int kOrderWordGroup = 4 * kOrderThreads;

struct alignas(16) OrderStorage {
  // From the first entry on, tokens in order; from the last one backwards, those of entries that named a token after
  // another entry had, in the order of chance.
  int32_t list[kMaxOrderEntries];
  uint32_t warp_tokens[kOrderWarps];  // tokens in the words of each warp's threads
  int32_t again;                      // how many tokens were named again
};

struct TokenOrder {
  static constexpr int kOwn = kMaxOrderEntries / kOrderThreads;  // entries of a thread

  OrderStorage& storage;
  const OrderParameters& params;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int fours_log2;    // of words that a thread has, which hold the bits of neighbouring tokens
  uint32_t* const named;   // bits of tokens
  uint16_t* const before;  // of each word: tokens ahead of it
  int32_t tokens[kOwn];    // of this thread's entries, -1 where there is none or it is not valid
  uint32_t is_again = 0;   // a bit for each of them

  __device__ __forceinline__ TokenOrder(OrderStorage& storage, const OrderParameters& params)
      : storage(storage),
        params(params),
        fours_log2(32 - __clz(max(0, params.s_kv - 1) / (32 * kOrderWordGroup))),
        named(reinterpret_cast<uint32_t*>(&storage + 1)),
        before(reinterpret_cast<uint16_t*>(named + (kOrderWordGroup << fours_log2))) {}

  // Where the word with a token's bit is.
  __device__ __forceinline__ int word_of(int32_t token) const {
    const int four = token / 128;
    const int own = four & ((1 << fours_log2) - 1);
    return (own * kOrderThreads + (four >> fours_log2)) * 4 + token / 32 % 4;
  }

  __device__ __forceinline__ uint4 own_words(int own) const {
    return reinterpret_cast<const uint4*>(named)[own * kOrderThreads + threadIdx.x];
  }

  __device__ __forceinline__ void run() {
    for (int own = 0; own < 1 << fours_log2; ++own) {
      reinterpret_cast<uint4*>(named)[own * kOrderThreads + threadIdx.x] = make_uint4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) storage.again = 0;
    read_entries();
    __syncthreads();
    name_tokens();
    __syncthreads();
    const uint32_t own = count_tokens();
    __syncthreads();
    const int32_t count = place_words(own);
    __syncthreads();
    place_tokens();
    __syncthreads();
    write_list(count);
  }

  // Every entry once: what another kernel writes to indices or lengths meanwhile changes which tokens are listed, not
  // where, and each entry gives one entry at most.
  __device__ __forceinline__ void read_entries() {
    const SparseQuery<64> query(params, blockIdx.x);
    const int32_t* const indices =
        params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i * kOrderThreads >= params.topk) break;
      const int32_t entry = i * kOrderThreads + static_cast<int32_t>(threadIdx.x);
      tokens[i] = entry < query.entries ? __ldg(indices + entry) : -1;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i * kOrderThreads >= params.topk) break;
      if (static_cast<uint32_t>(tokens[i]) >= query.token_limit) tokens[i] = -1;
    }
  }

  __device__ __forceinline__ void name_tokens() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i * kOrderThreads >= params.topk) break;
      if (tokens[i] < 0) continue;
      const uint32_t bit = 1u << tokens[i] % 32;
      if ((atomicOr(named + word_of(tokens[i]), bit) & bit) != 0) {
        is_again |= 1u << i;
        storage.list[kMaxOrderEntries - 1 - atomicAdd(&storage.again, 1)] = tokens[i];
      }
    }
  }

  // Tokens in this thread's words, and the warp's in shared memory. Returns those ahead of this thread's in its warp.
  __device__ __forceinline__ uint32_t count_tokens() {
    uint32_t count = 0;
    for (int own = 0; own < 1 << fours_log2; ++own) {
      const uint4 words = own_words(own);
      count += __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
    }
    const uint32_t through = warp_scan(count, lane);
    if (lane == 31) storage.warp_tokens[warp] = through;
    return through - count;
  }

  // How many tokens are ahead of each of this thread's words. Returns how many there are in all.
  __device__ __forceinline__ int32_t place_words(uint32_t place) {
    uint32_t all = 0;
#pragma unroll
    for (int other = 0; other < kOrderWarps; ++other) {
      if (other < warp) place += storage.warp_tokens[other];
      all += storage.warp_tokens[other];
    }
    for (int own = 0; own < 1 << fours_log2; ++own) {
      const uint4 words = own_words(own);
      const uint32_t second = place + __popc(words.x), third = second + __popc(words.y);
      const uint32_t fourth = third + __popc(words.z);
      reinterpret_cast<uint2*>(before)[own * kOrderThreads + threadIdx.x] =
          make_uint2(place | second << 16, third | fourth << 16);
      place = fourth + __popc(words.w);
    }
    return static_cast<int32_t>(all);
  }

  __device__ __forceinline__ void place_tokens() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i * kOrderThreads >= params.topk) break;
      if (tokens[i] < 0 || (is_again >> i & 1u) != 0) continue;
      const int word = word_of(tokens[i]);
      const uint32_t lower = named[word] & ((1u << tokens[i] % 32) - 1u);
      storage.list[before[word] + __popc(lower)] = tokens[i];
    }
  }

  // Behind the tokens those that are named again, in their order too: a result must not depend on chance.
  __device__ __forceinline__ void write_list(int32_t count) {
    int32_t* const list = params.lists + static_cast<int64_t>(blockIdx.x) * params.topk;
    const int32_t thread = static_cast<int32_t>(threadIdx.x), again = storage.again;
    for (int32_t place = thread; place < count; place += kOrderThreads) list[place] = storage.list[place];
    const int32_t* const named_again = storage.list + kMaxOrderEntries - again;
    for (int32_t own = thread; own < again; own += kOrderThreads) {
      const int32_t token = named_again[own];
      int32_t place = count;
      for (int32_t other = 0; other < again; ++other) {
        place += named_again[other] < token || (named_again[other] == token && other < own);
      }
      list[place] = token;
    }
    if (thread == 0) params.lengths[blockIdx.x] = count + again;
  }
};

}  // namespace cupymla::sparse_mla_fwd
