// A consumer warpgroup of the kernel `p_ds`: S and dP of its key tiles, and P and dS from them, to global memory.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "../../common/reduction.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "../../common/sparse_query.cuh"
#include "head_statistics.cuh"
#include "uniform_places.cuh"
#include "p_ds_storage.cuh"

namespace cupymla::sparse_mla_bwd {

// Scores: heads x entries.
template <typename Element>
struct PdsAtoms;

template <>
struct PdsAtoms<__nv_bfloat16> {
  using Scores = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<sm90::Major::K, sm90::Major::K>;
};

template <>
struct PdsAtoms<__half> {
  using Scores = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<sm90::Major::K, sm90::Major::K>;
};

// Which scores of a thread count.
struct EveryScore {
  static __device__ __forceinline__ bool counts(int) { return true; }
};

struct ValidScores {
  uint32_t words[4];  // a bit for each entry, shifted so that a thread's first is bit 0
  bool heads[2];      // whether there are this thread's two heads

  __device__ __forceinline__ bool counts(int i) const {
    return heads[i / 2 % 2] && (words[i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1u) != 0;
  }
};

template <typename Config, typename Element, int kWarpgroupIdx>
struct PdsConsumer {
  using Mma = typename PdsAtoms<Element>::Scores;
  static constexpr int kScores = Config::kHeads * Config::kTileKeys / Config::kWarpgroup;
  static constexpr int kTileSteps = Config::kTileColumns / 16;  // wgmma k steps in a tile
  static constexpr int kGroups = kScores / 4;                   // of eight entries
  static constexpr uint32_t kDistribution = 1 + kWarpgroupIdx;  // named barrier

  PdsStorage<Config>& storage;
  const Parameters& params;
  const int32_t first_head;
  // From one lane, so that the compiler knows it to be the same in all.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) % 4;
  const int lane = threadIdx.x % 32;
  const int row = warp * 16 + lane / 4;  // this thread has scores of that head and of the one eight further down

  float scores[kScores], gradients[kScores];
  Ring<Config::kStages> ring;

  __device__ __forceinline__ PdsConsumer(PdsStorage<Config>& storage, const Parameters& params,
                                         int32_t first_head)
      : storage(storage), params(params), first_head(first_head) {}

  // Before the first product, by consumer 1, which has the second key tile: two threads to a head, each with every
  // other 16 bytes of its channels.
  __device__ __forceinline__ void make_statistics(const QueryPosition& query) {
    const int own = (warp * 32 + lane) / 2, part = lane % 2;
    const int32_t head = first_head + own;
    const bool exists = head < params.h_q;
    const uint8_t* out = head_out(params, query, head);
    if (exists) prefetch_head_out<2, Config::kDV>(out, part);
    for (Mbarrier& full : storage.heads_full) full.wait(0);
    HeadSoftmax softmax;
    float delta = 0.f;
    if (exists) {
      delta = delta_part<Element, 2, Config::kDV, 16>(out, storage.dout, own, part);
      softmax = head_softmax(params, query, head);
    }
    delta += __shfl_xor_sync(0xffffffffu, delta, 1);
    if (part == 0) store_statistics(storage, own, softmax, delta);
    storage.statistics_out.arrive();
  }

  // The tiles of a key tile that the other consumer has.
  __device__ __forceinline__ void pass_by() {
    ring.stage += Config::kKeyTiles % Config::kStages;
    ring.full ^= Config::kKeyTiles / Config::kStages & 1u;
    if (ring.stage >= Config::kStages) {
      ring.stage -= Config::kStages;
      ring.full ^= 1u;
    }
  }

  // S and dP of a key tile, tile by tile.
  __device__ __forceinline__ void multiply(int32_t key_tile) {
    const bool is_first = key_tile == kWarpgroupIdx;
    if (key_tile > 0) storage.order[kWarpgroupIdx].wait((key_tile - 1) / Config::kConsumers & 1);
    const uint32_t base = uniform_base(storage);
    const uint64_t q = sm90::k_major_descriptor(place_from(base, storage, storage.q[0]));
    const uint64_t dout = sm90::k_major_descriptor(place_from(base, storage, storage.dout[0]));
    sm90::warpgroup_discard_operand(scores);
    sm90::warpgroup_discard_operand(gradients);
    uint32_t last = 0;
#pragma unroll
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      if (is_first && tile % Config::kPartTiles == 0) storage.heads_full[tile / Config::kPartTiles].wait(0);
      storage.full[ring.stage].wait(ring.full);
      if (tile == Config::kKeyTiles - 1) storage.order[1 - kWarpgroupIdx].arrive();
      fence_async_shared();
      const uint32_t stage = __reduce_max_sync(0xffffffffu, ring.stage);
      const uint64_t k = sm90::k_major_descriptor(place_from(base, storage, storage.k[0]) + stage * Config::kTileBytes);
      sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) {
        const uint32_t offset = tile * Config::kHeadTileBytes + step * 32;
        const uint64_t columns = sm90::descriptor_advance(k, step * 32);
        sm90::mma<Mma>(scores, sm90::descriptor_advance(q, offset), columns, tile == 0 && step == 0);
        if (tile < Config::kValueTiles) {
          sm90::mma<Mma>(gradients, sm90::descriptor_advance(dout, offset), columns, tile == 0 && step == 0);
        }
      }
      sm90::wgmma_commit();
      if (tile > 0) {
        sm90::wgmma_wait<1>();
        storage.free[last].arrive();
      }
      last = ring.stage;
      ring.advance();
    }
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(scores);
    sm90::warpgroup_fence_operand(gradients);
    storage.free[last].arrive();
  }

  // P and dS of the key tile, to where the kernel `dq_dkv` reads them.
  __device__ __forceinline__ void weigh(const SparseQuery<Config::kTileKeys>& query, int32_t key_tile, uint32_t place) {
    const uint4 words = *reinterpret_cast<const uint4*>(storage.valid[key_tile % Config::kWordSets]);
    const bool every = (words.x & words.y & words.z & words.w) == ~0u && first_head + Config::kHeads <= params.h_q;
    // All being valid is the rule, and has code of its own: a test for each number is a third of all instructions. All
    // warps take the same one, as they meet in it.
    if (__all_sync(0xffffffffu, every)) {
      weigh_where(EveryScore(), query, key_tile, place);
    } else {
      const int shift = 2 * (lane % 4);
      const ValidScores valid{{words.x >> shift, words.y >> shift, words.z >> shift, words.w >> shift},
                              {first_head + row < params.h_q, first_head + row + 8 < params.h_q}};
      weigh_where(valid, query, key_tile, place);
    }
  }

  template <typename Mask>
  __device__ __forceinline__ void weigh_where(const Mask& mask, const SparseQuery<Config::kTileKeys>& query,
                                              int32_t key_tile, uint32_t place) {
    const float lse[2] = {storage.lse[row], storage.lse[row + 8]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float p = exp2_approx(fmaf(scores[i], params.scale_log2, -lse[i / 2 % 2]));
      scores[i] = mask.counts(i) ? p : 0.f;
    }
    if (params.attn_dist != nullptr) add_distribution(query, key_tile);
    const float share[2] = {storage.share[row], storage.share[row + 8]};
    const float delta[2] = {storage.delta[row], storage.delta[row + 8]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores[i] *= share[r];
      const float gradient = scores[i] * (gradients[i] - delta[r]) * params.sm_scale;
      // P is zero there, but zero times a number that is not finite is none.
      gradients[i] = mask.counts(i) ? gradient : 0.f;
    }
    const int32_t block = key_tile * 2;
    uint8_t* tiles = stored_p_ds(params, place, block) + first_head / Config::kHeads % kPdsGroups *
                                                                (2 * kPdsTileBytes);
    store_block<0>(tiles);
    if (block * kPdsKeys + kPdsKeys < query.entries) store_block<1>(tiles + kPdsBlockBytes);
  }

  // P and dS of one of the key tile's blocks, places as `entry_of_place` has them: of every 32 entries a thread stores
  // sixteen bytes, and the quad 64 bytes side by side.
  template <int kBlock>
  __device__ __forceinline__ void store_block(uint8_t* tiles) const {
    const int quad_lane = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint8_t* to = tiles + swizzle_128(row + 8 * r, half * 4 + quad_lane);
        store_chunks<kBlock>(to, scores, half, r);
        store_chunks<kBlock>(to + kPdsTileBytes, gradients, half, r);
      }
    }
  }

  template <int kBlock>
  __device__ __forceinline__ void store_chunks(uint8_t* to, const float (&values)[kScores], int half, int r) const {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* v = values + (kBlock * 8 + half * 4 + j) * 4 + 2 * r;
      words[j] = pack_pair<Element>(v[0], v[1]);
    }
    store_uint4(to, make_uint4(words[0], words[1], words[2], words[3]));
  }

  // Adds up with the lane that far away: of twice that many sums the lower lane keeps the first half, the other one
  // the second.
  template <int kCount>
  __device__ __forceinline__ void halve(float (&sums)[2 * kGroups], int apart) const {
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float got = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + kCount], apart);
      sums[i] = (upper ? sums[i + kCount] : sums[i]) + got;
    }
  }

  // Adds the sums of the key tile's P (without the sink) over heads to the query's distribution, `scores` being P but
  // for the factors of its heads. Two CTAs add to a query's, two numbers to zero, so the order does not matter.
  __device__ __forceinline__ void add_distribution(const SparseQuery<Config::kTileKeys>& query, int32_t key_tile) {
    const float factor[2] = {storage.factor[row], storage.factor[row + 8]};
    float sums[2 * kGroups];
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const float* s = scores + i / 2 * 4 + i % 2;
      sums[i] = fmaf(s[2], factor[1], s[0] * factor[0]);
    }
    // Eight lanes have the same entries, of other heads. Each ends with the sums of an eighth of them.
    halve<kGroups>(sums, 16);
    halve<kGroups / 2>(sums, 8);
    halve<kGroups / 4>(sums, 4);
    auto& of_warps = storage.distribution[kWarpgroupIdx][key_tile / 2 % 2];
    const int first = lane / 16 * kGroups + lane / 8 % 2 * (kGroups / 2) + lane / 4 % 2 * (kGroups / 4);
#pragma unroll
    for (int i = 0; i < kGroups / 4; i += 2) {
      float* to = of_warps[warp] + (first + i) / 2 * 8 + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to) = make_float2(sums[i], sums[i + 1]);
    }
    named_barrier_sync(kDistribution, Config::kWarpgroup);
    const int32_t entry = warp * 32 + lane, first_entry = key_tile * Config::kTileKeys;
    if (first_entry + entry < query.entries) {
      float* start = params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
      reduce_add_float(start + first_entry + entry,
                       (of_warps[0][entry] + of_warps[1][entry]) + (of_warps[2][entry] + of_warps[3][entry]));
    }
  }

  __device__ __forceinline__ void run(const SparseQuery<Config::kTileKeys>& query, uint32_t place) {
    if constexpr (kWarpgroupIdx == 1) {
      make_statistics(query);
      pass_by();
    }
    for (int32_t key_tile = kWarpgroupIdx; key_tile < query.blocks; key_tile += Config::kConsumers) {
      multiply(key_tile);
      if (key_tile == kWarpgroupIdx) storage.statistics_out.wait(0);
      weigh(query, key_tile, place);
      pass_by();
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
