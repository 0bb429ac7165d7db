// What a consumer warpgroup holds, and the first half of its work on a block: consumer 0 makes P, consumer 1 dS.
#pragma once

#include "../../common/math.cuh"
#include "../../common/matrix.cuh"
#include "../../common/registers.cuh"
#include "../../common/reduction.cuh"
#include "atoms.cuh"
#include "../params.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element, int kWarpgroupIdx>
struct Consumer {
  static constexpr int kSteps = Config::kTileKeys / 16;  // wgmma k steps over 64 entries, or 64 heads
  static constexpr int kScores = Config::kHeads * Config::kTileKeys / Config::kWarpgroup;
  static constexpr int kWide = Config::kHeads * Config::kDV / 2 / Config::kWarpgroup;
  static constexpr bool kHasNarrow = Config::kHasRope && kWarpgroupIdx == 0;
  static constexpr int kNarrow = kHasNarrow ? Config::kHeads * Config::kTileColumns / Config::kWarpgroup : 1;
  // Whether a block's scores are multiplied in the block before: there have to be registers for them.
  static constexpr bool kMultipliesAhead = !kHasNarrow;
  static constexpr int kTiles = kWarpgroupIdx == 0 ? Config::kKeyTiles : Config::kValueTiles;  // of its scores

  Storage<Config>& storage;
  const Parameters& params;
  const int thread;  // its number in the warpgroup

  float dq_wide[kWide];      // the own 256 value columns
  float dq_narrow[kNarrow];  // consumer 0: the RoPE columns
  float scores[kScores];     // S, then P; or dP, then dS
  bool occupied;          // whether a KV block of this one had a valid entry
  int32_t entries[2];     // this thread's two entries of the block, as accumulator rows of dKV: token, or -1

  // In one register: the head block, above the parity of the block, which also says in which set its tokens are.
  uint32_t bits = 0;
  static constexpr uint32_t kParity = 1, kHeadBlock = 2;

  __device__ __forceinline__ Consumer(Storage<Config>& storage, const Parameters& params)
      : storage(storage),
        params(params),
        thread(static_cast<int>(threadIdx.x) % Config::kWarpgroup) {}

  // For what is worked out where it is used: ptxas would keep, and spill, what does not change from block to block.
  __device__ __forceinline__ int fresh_thread() const {
    int same = thread;
    make_opaque(same);
    return same;
  }
  __device__ __forceinline__ int warp() const { return fresh_thread() / 32; }
  __device__ __forceinline__ int lane() const { return fresh_thread() % 32; }
  // The first of its accumulator rows; the other one is eight further down.
  __device__ __forceinline__ int row() const {
    const int same = fresh_thread();
    return same / 32 * 16 + same % 32 / 4;
  }

  __device__ __forceinline__ uint32_t parity() const { return bits % kHeadBlock; }
  __device__ __forceinline__ int32_t head_block() const { return static_cast<int32_t>(bits / kHeadBlock); }
  __device__ __forceinline__ int32_t first_head() const { return sparse_mla_bwd::first_head<Config>(head_block()); }

  // Sets out on a head block.
  __device__ __forceinline__ void begin_head_block() {
    occupied = false;
#pragma unroll
    for (int i = 0; i < kWide; ++i) dq_wide[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kNarrow; ++i) dq_narrow[i] = 0.f;
  }

  // S = Q K^T or dP = dO V^T of the block with that parity, as its columns arrive.
  __device__ __forceinline__ void multiply_scores(uint32_t parity) {
    begin_scores();
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      storage.full[0][part].wait(parity);
      fence_async_shared();
      issue_scores(part);
    }
    finish_scores();
  }

  __device__ __forceinline__ void begin_scores() { sm90::warpgroup_fence_operand(scores); }

  // All of the next block, and one fence for it.
  __device__ __forceinline__ void wait_for_next_keys() {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) storage.full[0][part].wait(parity() ^ 1u);
    fence_async_shared();
  }

  __device__ __forceinline__ void issue_scores(int part) {
    const uint64_t a = sm90::k_major_descriptor(smem_address(kWarpgroupIdx == 0 ? storage.q[0] : storage.dout[0]));
    const uint64_t k = sm90::k_major_descriptor(smem_address(storage.k[0][0]));
    sm90::wgmma_fence();
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1) && tile < kTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint32_t offset = tile * Config::kTileBytes + step * 32;
        sm90::mma<typename Atoms<Element>::Scores>(scores, sm90::descriptor_advance(a, offset),
                                                   sm90::descriptor_advance(k, offset), tile == 0 && step == 0);
      }
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void finish_scores() {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
  }

  // Which of this thread's sixteen columns are valid entries, for either of its heads: bit c for column c less the
  // lane's 2 * (lane % 4). Also looks up the entries that this thread's rows of dKV stand for.
  __device__ __forceinline__ void read_validity(uint32_t (&low)[2], uint32_t (&high)[2]) {
    const uint64_t words = *reinterpret_cast<const uint64_t*>(validity());
    occupied = occupied || words != 0;
    const int own_lane = lane(), own_row = row();
    const uint64_t shifted = words >> (2 * (own_lane % 4));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = first_head() + head_of_row<Config>(own_row + 8 * r) < params.h_q;
      low[r] = there ? static_cast<uint32_t>(shifted) : 0u;
      high[r] = there ? static_cast<uint32_t>(shifted >> 32) : 0u;
      const int32_t token = storage.tokens[parity()][own_row + 8 * r];
      // Of rows of packed queries each is some query's, and the producer has checked its token.
      entries[r] = Config::kQueries > 1 || ((words >> (own_row + 8 * r)) & 1u) != 0 ? token : -1;
    }
  }

  // The block's validity words, as the query of this warp's heads has them.
  __device__ __forceinline__ const uint16_t* validity() const {
    if constexpr (Config::kQueries == 1) return storage.valid[0];
    return storage.query_valid[parity()][own_query()];
  }

  // Of several queries, the one whose heads this warp has.
  __device__ __forceinline__ int own_query() const { return warp() * 16 / Config::kQueryHeads; }

  static __device__ __forceinline__ bool is_valid(const uint32_t (&low)[2], const uint32_t (&high)[2], int i) {
    const int column = (i / 4) * 8 + i % 2;
    const int r = (i / 2) % 2;
    return (((column < 32 ? low[r] : high[r]) >> (column % 32)) & 1u) != 0;
  }

  // Where this lane's row of one step of a P or dS tile lies, for stmatrix and ldmatrix.
  __device__ __forceinline__ uint32_t fragment_address(const uint8_t* tile, int step) const {
    const int own = lane();
    return smem_address(tile) + swizzle_128(warp() * 16 + own % 16, step * 2 + own / 16);
  }

  // Of this thread's two heads. Read in each block: there are no registers to keep them in.
  struct HeadNumbers {
    float of[2];
  };
  __device__ __forceinline__ HeadNumbers of_own_heads(const float (&numbers)[Config::kHeads]) const {
    const int own = row();
    return {{numbers[own], numbers[own + 8]}};
  }

  // Consumer 0: P of the block, rounded, into its tile, and into dS's tile what that loses, so that consumer 1 knows P
  // to twice the precision. S is in `scores`.
  __device__ __forceinline__ void make_probabilities(bool wants_distribution) {
    uint32_t low[2], high[2];
    read_validity(low, high);
    make_probabilities_of_half<0>(low, high);
    make_probabilities_of_half<1>(low, high);
    if (wants_distribution) sum_over_heads();
  }

  // Half of the entries at a time: consumer 1 works on the first while the second is made.
  template <int kHalf>
  __device__ __forceinline__ void make_probabilities_of_half(const uint32_t (&low)[2], const uint32_t (&high)[2]) {
    const HeadNumbers lse = of_own_heads(storage.lse), share = of_own_heads(storage.share);
#pragma unroll
    for (int i = kHalf * kScores / 2; i < (kHalf + 1) * kScores / 2; ++i) {
      const int r = (i / 2) % 2;
      const float p = exp2_approx(fmaf(scores[i], params.scale_log2, -lse.of[r]));
      scores[i] = is_valid(low, high, i) ? p : 0.f;
    }
    if constexpr (kHalf == 0) storage.tiles_free.wait(parity() ^ 1u);
#pragma unroll
    for (int step = kHalf * kSteps / 2; step < (kHalf + 1) * kSteps / 2; ++step) {
      uint32_t rounded[4], lost[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = step * 8 + j * 2;
        split(scores[i] * share.of[j % 2], scores[i + 1] * share.of[j % 2], rounded[j], lost[j]);
      }
      store_matrix_x4(fragment_address(storage.p, step), rounded[0], rounded[1], rounded[2], rounded[3]);
      store_matrix_x4(fragment_address(storage.ds, step), lost[0], lost[1], lost[2], lost[3]);
    }
    fence_async_shared();
    storage.p_ready[kHalf].arrive();
  }

  // Two numbers as the pair that a product reads, and as a second pair what is missing in the first.
  static __device__ __forceinline__ void split(float x, float y, uint32_t& rounded, uint32_t& lost) {
    rounded = pack_pair<Element>(x, y);
    const float2 kept = unpack(rounded);
    lost = pack_pair<Element>(x - kept.x, y - kept.y);
  }

  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    const Element* elements = reinterpret_cast<const Element*>(&pair);
    return make_float2(static_cast<float>(elements[0]), static_cast<float>(elements[1]));
  }

  // Leaves the sums of the block's P (without the sink) over each warp's heads in shared memory. `scores` is P but for
  // the factors of its heads.
  __device__ __forceinline__ void sum_over_heads() {
    const int own = row();
    const float factor = storage.factor[own], factor_below = storage.factor[own + 8];
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float sum = fmaf(scores[i + column + 2], factor_below, scores[i + column] * factor);
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 8);
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (lane() < 4) storage.distribution[warp()][i * 2 + lane() * 2 + column] = sum;
      }
    }
  }

  // Adds them to the query's distribution, whose element for the block's first entry is `start`. The same thread adds
  // in each head block, so the order is fixed.
  __device__ __forceinline__ void add_distribution(float* start, int32_t entries_left) {
    named_barrier_sync(kDistribution, Config::kWarpgroup);
    const int entry = fresh_thread();
    if (entry < Config::kTileKeys && entry < entries_left) {
      const auto& sums = storage.distribution;
      reduce_add_float(start + entry, (sums[0][entry] + sums[1][entry]) + (sums[2][entry] + sums[3][entry]));
    }
    named_barrier_sync(kDistribution, Config::kWarpgroup);
  }

  // The same where queries are packed. The block's first row is `first_row` of the work.
  __device__ __forceinline__ void put_distribution(const Work<Config>& work, int32_t first_row) {
    constexpr int kQueryWarps = Config::kQueryHeads / 16;
    named_barrier_sync(kDistribution, Config::kWarpgroup);
    const int column = (warp() * 32 + lane()) % Config::kTileKeys;
#pragma unroll
    for (int turn = 0; turn < Config::kQueries / 2; ++turn) {
      const int own = turn * 2 + warp() / 2;
      const uint64_t words = *reinterpret_cast<const uint64_t*>(storage.query_valid[parity()][own]);
      if ((words >> column & 1u) != 0) {
        float sum = storage.distribution[own * kQueryWarps][column];
        if constexpr (kQueryWarps == 2) sum += storage.distribution[own * kQueryWarps + 1][column];
        work.distribution(params, own)[work.named_by(params, first_row + column, own)] = sum;
      }
    }
    named_barrier_sync(kDistribution, Config::kWarpgroup);
  }

  // Consumer 1: dS of the block into its tile. dP is in `scores`.
  __device__ __forceinline__ void make_score_gradients() {
    uint32_t low[2], high[2];
    read_validity(low, high);
    make_score_gradients_of_half<0>(low, high);
    make_score_gradients_of_half<1>(low, high);
    fence_async_shared();
    storage.ds_ready.arrive();
  }

  template <int kHalf>
  __device__ __forceinline__ void make_score_gradients_of_half(const uint32_t (&low)[2], const uint32_t (&high)[2]) {
    const HeadNumbers delta = of_own_heads(storage.delta);
    storage.p_ready[kHalf].wait(parity());
#pragma unroll
    for (int step = kHalf * kSteps / 2; step < (kHalf + 1) * kSteps / 2; ++step) {
      uint32_t rounded[4], lost[4];
      load_matrix_x4(rounded, fragment_address(storage.p, step));
      load_matrix_x4(lost, fragment_address(storage.ds, step));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 first = unpack(rounded[j]), second = unpack(lost[j]);
        const float p[2] = {first.x + second.x, first.y + second.y};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int i = step * 8 + j * 2 + c;
          const float ds = p[c] * (scores[i] - delta.of[j % 2]) * params.sm_scale;
          scores[i] = is_valid(low, high, i) ? ds : 0.f;
        }
      }
    }
    // A warp stores to its own rows only, which it has read.
    __syncwarp();
#pragma unroll
    for (int step = kHalf * kSteps / 2; step < (kHalf + 1) * kSteps / 2; ++step) {
      const float* s = scores + step * 8;
      store_matrix_x4(fragment_address(storage.ds, step), pack_pair<Element>(s[0], s[1]),
                      pack_pair<Element>(s[2], s[3]), pack_pair<Element>(s[4], s[5]), pack_pair<Element>(s[6], s[7]));
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
