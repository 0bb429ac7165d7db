// A consumer warpgroup of the kernel for neighbouring queries: scores of four queries on each block of rows. A warp has
// one query: it sums over its heads, keeps the sums in the query's row of the distribution in the order of tokens, and
// when all are there puts each where its entry is.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../../common/math.cuh"
#include "head_sums.cuh"
#include "packed_storage.cuh"
#include "products.cuh"

namespace cupymla::attn_dist {

template <typename Config, typename Element>
struct PackedConsumer {
  static constexpr int kScores = Products<Config, Element>::kScores;
  static constexpr int kRowEntries = Config::kMaxEntries / 32;  // of a row that a lane puts in place
  static constexpr int kChunk = 16;                         // of them at a time, where rows are shorter

  PackedStorage<Config>& storage;
  const Parameters& params;
  const int warp;  // over both consumers: the query's place in the query group
  const HeadSums heads;
  PipelineState state;   // the next in the ring
  uint32_t query_groups = 0;  // ended so far
  uint32_t blocks = 0;   // multiplied so far, of all query groups
  Products<Config, Element> products;

  __device__ __forceinline__ PackedConsumer(PackedStorage<Config>& storage, const Parameters& params, int warpgroup_idx)
      : storage(storage),
        params(params),
        warp(warpgroup_idx * 4 + static_cast<int>(threadIdx.x / 32 % 4)),
        heads{static_cast<int>(threadIdx.x % 32)} {}

  __device__ __forceinline__ int set() const { return static_cast<int>(query_groups & 1u); }
  __device__ __forceinline__ int query() const { return storage.query_group[set()].first_query + warp; }

  __device__ __forceinline__ void run() {
    while (begin_query_group()) {
      do {
        take_block();
      } while (state.count != storage.query_group[set()].end);
      if (query() < params.s_q) put_in_place();
      ++query_groups;
    }
  }

  // Takes in Q of the next query group; false when there is none.
  __device__ __forceinline__ bool begin_query_group() {
    storage.full[state.buffer()][0].wait(state.parity());
    const QueryGroup& query_group = storage.query_group[set()];
    if (query_group.first_query < 0) return false;
    const bool exists = query() < params.s_q;
    if (heads.lane == 0) {
      storage.row[warp] = params.dist + query_group.batch * params.dist_batch + query() * params.dist_query;
    }
    const float* lse = params.lse + query_group.batch * params.lse_batch + query() * params.lse_query;
    const float own = heads.read_lse(lse, params.lse_head, exists ? params.h_q : 0);
    // The first of the two buffers has the first consumer's queries. Q is overwritten in one place, so that ptxas knows
    // that the last query group's is not needed any more.
    const int which = (state + warp / 4).buffer();
    for (int half = 0; half < Config::kConsumers; ++half) {
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) storage.full[state.buffer()][part].wait(state.parity());
      ++state.count;
    }
    products.load(storage.k[which][0], warp, heads.lane);
    for (int half = 0; half < Config::kConsumers; ++half) {
      free_half(half, 0);
      free_half(half, 1);
    }
    heads.keep_lse(storage.lse[set()][warp], own, params);
    return true;
  }

  __device__ __forceinline__ void free_half(int which, int half) { storage.free[which][half].arrive(); }

  // One set of scores: while this consumer has its exponentials, the tensor cores multiply for the other one.
  __device__ __forceinline__ void take_block() {
    float scores[kScores];
    const int buffer = state.buffer();
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) storage.full[buffer][part].wait(state.parity());
    const uint64_t keys = Products<Config, Element>::descriptor(storage.k[buffer][0]);
    // What takes long and needs no tensor cores comes before the turn.
    fence_async_shared();
    // A fresh mbarrier counts as having completed the phase before its first: the first consumer may begin.
    storage.order[warp / 4].wait((blocks ^ (warp < 4 ? 1u : 0u)) & 1u);
    products.issue(scores, keys, [&](int tile) {
      if (tile == Config::kLeftTile) {
        sm90::wgmma_wait<1>();
        free_half(buffer, 0);
      }
      if (tile == Config::kOrderTile) storage.order[1 - warp / 4].arrive();
    });
    sm90::wgmma_wait<0>();
    free_half(buffer, 1);
    ++blocks;
    sm90::warpgroup_fence_operand(scores);
    finish(scores);
    ++state.count;
  }

  // A block's sums over the query's heads go to the row, those of the query's tokens alone, in their order.
  __device__ __forceinline__ void finish(float (&scores)[kScores]) {
    const int column = heads.column();
    const BlockRows row_set = storage.row_sets[state.row_set()][warp][column / 16];
    if (!__any_sync(0xffffffffu, row_set.rows != 0)) return;
    float sums[2];
    heads.sum(scores, params.h_q, storage.lse[set()][warp], params.scale_log2, sums);
    const uint32_t bit = 1u << column % 16, first = row_set.rows & bit;
    float* place = storage.row[warp] + row_set.first + __popc(row_set.rows & (bit - 1));
    if (first != 0) __stcg(place, sums[0]);
    if ((row_set.rows & 2 * bit) != 0) __stcg(place + (first != 0 ? 1 : 0), sums[1]);
  }

  // Sums in the order of tokens become the row: each entry gets its token's, or zero where it is not valid. The row is
  // its own scratch memory, so all that a lane writes is read first.
  __device__ __forceinline__ void put_in_place() {
    const QueryGroup& query_group = storage.query_group[set()];
    const SparseQuery<Config::kTileKeys> sparse(params,
                                                static_cast<uint32_t>(query_group.batch) * params.s_q + query());
    const int32_t* indices =
        params.indices + query_group.batch * params.indices_batch + query() * params.indices_query;
    const uint64_t* members = storage.members[set()][warp];
    const uint16_t* before = storage.before[set()][warp];
    float* row = storage.row[warp];
    float values[kRowEntries] = {};
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kRowEntries; chunk += kChunk) {
      if (chunk * 32 < params.topk) {
        uint32_t token[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int32_t entry = (chunk + i) * 32 + heads.lane;
          token[i] = entry < sparse.entries ? static_cast<uint32_t>(__ldg(indices + entry)) : 0xffffffffu;
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (token[i] < sparse.token_limit) {
            // Not a member: somebody wrote to `indices` meanwhile. Places are of tokens that are.
            const uint64_t bits = members[token[i] / 64] >> token[i] % 64;
            if ((bits & 1u) != 0) {
              const uint64_t lower = members[token[i] / 64] & ((1ull << token[i] % 64) - 1);
              values[chunk + i] = __ldcg(row + before[token[i] / 64] + __popcll(lower));
            }
          }
        }
      }
    }
    __syncwarp();
    const float divisor = params.normalize != 0 ? divide_by(values) : 1.f;
#pragma unroll
    for (int i = 0; i < kRowEntries; ++i) {
      const int32_t entry = i * 32 + heads.lane;
      if (entry < params.topk) __stcg(row + entry, params.normalize != 0 ? values[i] / divisor : values[i]);
    }
  }

  // The sum of the row, or the least divisor.
  __device__ __forceinline__ float divide_by(const float (&values)[kRowEntries]) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kRowEntries; ++i) {
      if (i * 32 < params.topk) total += values[i];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
    return max_nan(total, kLeastDivisor);
  }
};

}  // namespace cupymla::attn_dist
