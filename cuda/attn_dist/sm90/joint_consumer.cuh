// A consumer warpgroup of the kernel for neighbouring queries: scores of four queries on each block of rows. A warp has
// one query: it sums over its heads, keeps the sums in the query's row of the distribution in the order of tokens, and
// when all are there puts each where its slot is.
#pragma once

#include "../../common/sparse_query.cuh"
#include "../../common/math.cuh"
#include "head_sums.cuh"
#include "joint_storage.cuh"
#include "products.cuh"

namespace cupymla::attn_dist {

template <typename Config, typename Element>
struct JointConsumer {
  static constexpr int kScores = Products<Config, Element>::kScores;
  static constexpr int kRowSlots = Config::kMaxSlots / 32;  // of a row that a lane puts in place
  static constexpr int kChunk = 16;                         // of them at a time, where rows are shorter

  JointStorage<Config>& storage;
  const Parameters& params;
  const int warp;  // over both consumers: the query's place in the bunch
  const HeadSums heads;
  Turn turn;             // the next in the ring
  uint32_t bunches = 0;  // ended so far
  uint32_t blocks = 0;   // multiplied so far, of all bunches
  Products<Config, Element> products;

  __device__ __forceinline__ JointConsumer(JointStorage<Config>& storage, const Parameters& params, int who)
      : storage(storage),
        params(params),
        warp(who * 4 + static_cast<int>(threadIdx.x / 32 % 4)),
        heads{static_cast<int>(threadIdx.x % 32)} {}

  __device__ __forceinline__ int set() const { return static_cast<int>(bunches & 1u); }
  __device__ __forceinline__ int query() const { return storage.bunch[set()].first_query + warp; }

  __device__ __forceinline__ void run() {
    while (begin_bunch()) {
      do {
        take_block();
      } while (turn.count != storage.bunch[set()].end);
      if (query() < params.s_q) put_in_place();
      ++bunches;
    }
  }

  // Takes in Q of the next bunch; false when there is none.
  __device__ __forceinline__ bool begin_bunch() {
    storage.full[turn.buffer()][0].wait(turn.parity());
    const Bunch& bunch = storage.bunch[set()];
    if (bunch.first_query < 0) return false;
    const bool exists = query() < params.s_q;
    if (heads.lane == 0) {
      storage.row[warp] = params.dist + bunch.batch * params.dist_batch + query() * params.dist_query;
    }
    const float* lse = params.lse + bunch.batch * params.lse_batch + query() * params.lse_query;
    const float own = heads.read_lse(lse, params.lse_head, exists ? params.h_q : 0);
    // The first of the two buffers has the first consumer's queries. Q is overwritten in one place, so that ptxas knows
    // that the last bunch's is not needed any more.
    const int which = (turn + warp / 4).buffer();
    for (int half = 0; half < Config::kConsumers; ++half) {
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) storage.full[turn.buffer()][part].wait(turn.parity());
      ++turn.count;
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
    const int buffer = turn.buffer();
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) storage.full[buffer][part].wait(turn.parity());
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
      if (tile == Config::kTurnTile) storage.order[1 - warp / 4].arrive();
    });
    sm90::wgmma_wait<0>();
    free_half(buffer, 1);
    ++blocks;
    sm90::pin_registers(scores);
    finish(scores);
    ++turn.count;
  }

  // A block's sums over the query's heads go to the row, those of the query's tokens alone, in their order.
  __device__ __forceinline__ void finish(float (&scores)[kScores]) {
    const int column = heads.column();
    const Share share = storage.shares[turn.share()][warp][column / 16];
    if (!__any_sync(0xffffffffu, share.rows != 0)) return;
    float sums[2];
    heads.sum(scores, params.h_q, storage.lse[set()][warp], params.scale_log2, sums);
    const uint32_t bit = 1u << column % 16, first = share.rows & bit;
    float* place = storage.row[warp] + share.first + __popc(share.rows & (bit - 1));
    if (first != 0) __stcg(place, sums[0]);
    if ((share.rows & 2 * bit) != 0) __stcg(place + (first != 0 ? 1 : 0), sums[1]);
  }

  // Sums in the order of tokens become the row: each slot gets its token's, or zero where it is not valid. The row is
  // its own scratch memory, so all that a lane writes is read first.
  __device__ __forceinline__ void put_in_place() {
    const Bunch& bunch = storage.bunch[set()];
    const SparseQuery<Config::kSlots> sparse(params, static_cast<uint32_t>(bunch.batch) * params.s_q + query());
    const int32_t* indices =
        params.indices + bunch.batch * params.indices_batch + query() * params.indices_query;
    const uint64_t* members = storage.members[set()][warp];
    const uint16_t* before = storage.before[set()][warp];
    float* row = storage.row[warp];
    float values[kRowSlots] = {};
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kRowSlots; chunk += kChunk) {
      if (chunk * 32 < params.topk) {
        uint32_t token[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          const int32_t slot = (chunk + i) * 32 + heads.lane;
          token[i] = slot < sparse.slots ? static_cast<uint32_t>(__ldg(indices + slot)) : 0xffffffffu;
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
    for (int i = 0; i < kRowSlots; ++i) {
      const int32_t slot = i * 32 + heads.lane;
      if (slot < params.topk) __stcg(row + slot, params.normalize != 0 ? values[i] / divisor : values[i]);
    }
  }

  // The sum of the row, or the least divisor.
  __device__ __forceinline__ float divide_by(const float (&values)[kRowSlots]) const {
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kRowSlots; ++i) {
      if (i * 32 < params.topk) total += values[i];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
    return max_nan(total, kLeastDivisor);
  }
};

}  // namespace cupymla::attn_dist
