// A consumer warpgroup of the kernel `dq_dkv`: dQ of 64 heads, and dKV of every other block.
#pragma once

#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "../../common/sparse_query.cuh"
#include "dq_dkv_storage.cuh"
#include "cluster_rows.cuh"
#include "query_gradient_columns.cuh"
#include "uniform_places.cuh"

namespace cupymla::sparse_mla_bwd {

// Query: dQ, heads x columns, keys read across their rows. Key: dKV, entries x columns, both operands read across.
template <typename Element, int kTiles>
struct DqDkvAtoms;

template <>
struct DqDkvAtoms<__nv_bfloat16, 3> {
  using Query = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<sm90::Major::K, sm90::Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<sm90::Major::MN, sm90::Major::MN>;
};
template <>
struct DqDkvAtoms<__nv_bfloat16, 2> {
  using Query = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<sm90::Major::K, sm90::Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<sm90::Major::MN, sm90::Major::MN>;
};
template <>
struct DqDkvAtoms<__half, 3> {
  using Query = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<sm90::Major::K, sm90::Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<sm90::Major::MN, sm90::Major::MN>;
};
template <>
struct DqDkvAtoms<__half, 2> {
  using Query = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<sm90::Major::K, sm90::Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x128x16_F32F16F16_SS<sm90::Major::MN, sm90::Major::MN>;
};

// kLast: of the CTA that has the query's last columns.
template <typename Config, typename Element, int kWarpgroupIdx, bool kLast>
struct DqDkvConsumer {
  static constexpr int kTiles = ColumnSplit<Config>::tiles(kLast),
                       kValueTiles = ColumnSplit<Config>::value_tiles(kLast);
  static constexpr bool kHasRope = kTiles > kValueTiles;
  using Atoms = DqDkvAtoms<Element, kTiles>;
  static constexpr int kTileSums = Config::kTileKeys * Config::kTileColumns / Config::kWarpgroup;
  static constexpr int kSums = kTiles * kTileSums;
  static constexpr int kSteps = Config::kTileKeys / 16;          // wgmma k steps over 64 entries, or 64 heads
  static constexpr uint32_t kStepBytes = 2 * kSwizzleAtomBytes;  // from sixteen rows of a tile to the next

  DqDkvStorage<Config>& storage;
  const Parameters& params;
  // Through a shuffle, or ptxas asks for it anew wherever it is wanted, in one queue with reductions.
  const uint32_t thread = __shfl_sync(0xffffffffu, threadIdx.x % Config::kWarpgroup, threadIdx.x % 32);

  float dq[kSums];  // of 64 heads
  int32_t rows[2];  // where sums of this thread's two entries of its last block go, see ClusterRowTargets
  Ring<Config::kSets> ring;

  __device__ __forceinline__ DqDkvConsumer(DqDkvStorage<Config>& storage, const Parameters& params)
      : storage(storage), params(params) {
#pragma unroll
    for (float& sum : dq) sum = 0.f;
  }

  // The first of its accumulator rows; the other one is eight further down.
  __device__ __forceinline__ int32_t row() const { return static_cast<int32_t>(thread / 32 * 16 + thread % 32 / 4); }

  __device__ __forceinline__ uint32_t uniform_set() const { return __reduce_max_sync(0xffffffffu, ring.stage); }

  __device__ __forceinline__ void wait_for_block() {
    storage.full[ring.stage].wait(ring.full);
    fence_async_shared();
  }

  __device__ __forceinline__ void give_back() {
    storage.free[ring.stage].arrive();
    ring.advance();
  }

  __device__ __forceinline__ uint32_t p_ds_at(uint32_t base, uint32_t set, int group, int which) const {
    return place_from(base, storage, storage.p_ds[0][group][which]) +
           set * static_cast<uint32_t>(sizeof(storage.p_ds[0]));
  }

  // dQ += dS K.
  __device__ __forceinline__ void issue_query_gradient(uint32_t base, uint32_t set) {
    const uint64_t ds = sm90::k_major_descriptor(p_ds_at(base, set, kWarpgroupIdx, 1));
    const uint32_t keys = place_from(base, storage, storage.k[0]) + set * static_cast<uint32_t>(sizeof(storage.k[0]));
    const uint64_t k = sm90::mn_major_descriptor(keys, Config::kTileBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sm90::mma<typename Atoms::Query>(dq, sm90::descriptor_advance(ds, step * 32),
                                       sm90::descriptor_advance(k, step * kStepBytes));
    }
  }

  // sums = dS^T Q + P^T dO.
  __device__ __forceinline__ void issue_key_gradient(float (&sums)[kSums], uint32_t base, uint32_t set) {
    const auto across = [&](uint32_t tile) { return sm90::mn_major_descriptor(tile, Config::kTileBytes); };
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) {
      const uint64_t a = across(p_ds_at(base, set, group, 1));
      const uint64_t b = across(place_from(base, storage, storage.q[group][0]));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        sm90::mma<typename Atoms::Key>(sums, sm90::descriptor_advance(a, step * kStepBytes),
                                       sm90::descriptor_advance(b, step * kStepBytes), group == 0 && step == 0);
      }
    }
#pragma unroll
    for (int group = 0; group < Config::kGroups; ++group) {
      const uint64_t a = across(p_ds_at(base, set, group, 0));
      const uint64_t b = across(place_from(base, storage, storage.dout[group][0]));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // Of the RoPE's columns there are no values, but zeros, which stay zeros as P is 1 at most: products of another
        // shape could not add to these sums without waiting for the ones before.
        sm90::mma<typename Atoms::Key>(sums, sm90::descriptor_advance(a, step * kStepBytes),
                                       sm90::descriptor_advance(b, step * kStepBytes));
      }
    }
  }

  // Which rows this thread's entries of the block are.
  __device__ __forceinline__ void read_rows(const QueryPosition& query, int32_t block) {
    const int32_t first_row = row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t place_of_entry = first_row + 8 * r, token = storage.tokens[ring.stage][place_of_entry];
      if (Config::kPartials) {
        const int32_t place = static_cast<int32_t>(ColumnSplit<Config>::place());
        rows[r] = token >= 0 ? place * params.topk + block * Config::kTileKeys + entry_of_place(place_of_entry) : -1;
      } else {
        const int32_t spare = static_cast<int32_t>(params.kv_rows) + place_of_entry;
        rows[r] = token >= 0 ? query.batch * params.s_kv + token : spare;
      }
    }
  }

  // A block whose dKV is this consumer's: its dQ, and the sums, which are sent with the next one.
  __device__ __forceinline__ void take_own(float (&sums)[kSums], const QueryPosition& query, int32_t block) {
    wait_for_block();
    const uint32_t base = uniform_base(storage), set = uniform_set();
    sm90::warpgroup_fence_operand(dq);
    sm90::warpgroup_discard_operand(sums);
    sm90::wgmma_fence();
    issue_query_gradient(base, set);
    issue_key_gradient(sums, base, set);
    sm90::wgmma_commit();
    read_rows(query, block);
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(dq);
    sm90::warpgroup_fence_operand(sums);
    give_back();
  }

  // A block of the other consumer's: its dQ.
  __device__ __forceinline__ void issue_other() {
    wait_for_block();
    const uint32_t base = uniform_base(storage), set = uniform_set();
    sm90::warpgroup_fence_operand(dq);
    sm90::wgmma_fence();
    issue_query_gradient(base, set);
    sm90::wgmma_commit();
  }
  __device__ __forceinline__ void finish_other() {
    sm90::wgmma_wait<0>();
    sm90::warpgroup_fence_operand(dq);
    give_back();
  }

  __device__ __forceinline__ void send(const float (&sums)[kSums]) const {
    ClusterRowTargets<Config> places(params, rows, ColumnSplit<Config>::first_tile() * Config::kTileColumns, thread);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float of_tile[kTileSums];
#pragma unroll
      for (int i = 0; i < kTileSums; ++i) of_tile[i] = sums[tile * kTileSums + i];
      if constexpr (Config::kPacked) {
        if (kHasRope && tile == kTiles - 1) {
          send_packed_rope(of_tile, places);
        } else {
          send_packed_values(of_tile, places);
        }
      } else {
        ClusterRowTargets<Config>::arrange(of_tile, thread);
#pragma unroll
        for (int part = 0; part < ClusterRowTargets<Config>::kTileParts; ++part) places.send(of_tile, part, false);
      }
      places.here += Config::kTileColumns * (Config::kPacked ? 2 : 4);
    }
  }

  // A tile of values: of every 32 columns a thread's eight of either row.
  __device__ __forceinline__ void send_packed_values(const float (&sums)[kTileSums],
                                                     const ClusterRowTargets<Config>& places) const {
    float eights[4][kPackedColumns];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
      for (int i = 0; i < kPackedColumns; ++i) {
        eights[part][i] = sums[(part % 2 * 4 + i / 2) * 4 + part / 2 * 2 + i % 2];
      }
    }
    uint4 packed[4];
    pack_eights(eights, packed);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      places.put_packed(rows[part / 2], part % 2 * ClusterRowTargets<Config>::kGroup + thread % 4 * kPackedColumns,
                        packed[part]);
    }
  }

  // Packed columns of the RoPE lie in another order than those of values.
  __device__ __forceinline__ void send_packed_rope(const float (&sums)[kTileSums],
                                                   const ClusterRowTargets<Config>& places) const {
    float eights[4][kPackedColumns];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
#pragma unroll
      for (int i = 0; i < kPackedColumns; ++i) eights[run][i] = sums[run * 8 + i];
      ClusterRowTargets<Config>::arrange_half(eights[run], thread);
    }
    uint4 packed[4];
    pack_eights(eights, packed);
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      places.put_packed((thread & 1) != 0 ? rows[1] : rows[0], run * kColumnRun + thread % 4 / 2 * kPackedColumns,
                        packed[run]);
    }
  }

  __device__ __forceinline__ void run(const SparseQuery<Config::kTileKeys>& query) {
    storage.heads_full.wait(0);
    int32_t block = 0;
    if (kWarpgroupIdx == 1 && query.blocks > 0) {
      issue_other();
      finish_other();
      block = 1;
    }
    for (; block + 1 < query.blocks; block += 2) {
      float sums[kSums];
      take_own(sums, query, block);
      issue_other();
      // Packing has branches, at which ptxas would have all products waited for.
      if constexpr (Config::kPartials) finish_other();
      send(sums);
      if constexpr (!Config::kPartials) finish_other();
    }
    if (block < query.blocks) {
      float sums[kSums];
      take_own(sums, query, block);
      send(sums);
    }
    store_query_gradient(query);
  }

  __device__ __forceinline__ void store_query_gradient(const QueryPosition& query) const {
    uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
#pragma unroll
    for (int part = 0; part < kTiles * 2; ++part) {
      const int32_t column = ColumnSplit<Config>::first_tile() * Config::kTileColumns + part * 32;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int32_t head = kWarpgroupIdx * Config::kHeads + row() + 8 * r;
        store_query_gradient_columns<Element>(start + head * params.dq_head_bytes + column * 2, head < params.h_q,
                                              dq + part * 16 + 2 * r, thread % 4);
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
