// The epilogue warpgroup: most of Q into Tensor Memory before a query; after it O from there, times each head's factor,
// to global memory. Where pairs share a query it leaves O as it is for the merge instead.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/math.cuh"
#include "../../common/sm100/gather.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/tma.cuh"
#include "lengths.cuh"
#include "merge.cuh"

namespace cupymla::sparse_mla_fwd {

// One warp's arrival at a barrier of the CTA that issues the products. What the warp has written, into Tensor Memory or
// its own CTA's shared memory, is for the products alone, and ordered before them by the fences that stand before this.
template <typename Config>
__device__ __forceinline__ void arrive_at_leader(Mbarrier& barrier, const CtaPosition<Config>& cta, uint32_t lane) {
  __syncwarp();
  if (lane != 0) return;
  if constexpr (Config::kCtas == 1) {
    barrier.arrive();
  } else {
    cluster_arrive_after_reads_at(cluster_address(smem_address(&barrier.state), cta.leader));
  }
}

template <typename Storage, typename Element>
struct Epilogue {
  using Config = typename Storage::Config;
  static constexpr uint32_t kColumns = 32;  // of a pass

  Storage& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const CtaPosition<Config> cta;
  const uint32_t warp = threadIdx.x / 32 % 4;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t row = warp % 2 * 32 + lane;  // head of this CTA
  const uint32_t side = warp / 2;             // which half of the lanes, and so which channels
  Lengths<Storage> lengths;
  uint32_t o_parity = 0, stats_parity = 0;
  uint32_t q_parity = 0;  // of q_staged; of q_free the other
  uint32_t stage = 0;     // of the ring, where the next Q comes

  __device__ __forceinline__ Epilogue(Storage& storage, const Parameters& params, const TensorMap& q_map)
      : storage(storage), params(params), q_map(q_map), lengths{storage, params} {}

  // Q of a query goes ahead of O of the query before it, which is done later than that query's scores.
  __device__ __forceinline__ void run() {
    uint32_t before = params.items;
    int32_t entries_before = 0;
    for_each_item(params, cta, [&](uint32_t item) {
      const int32_t entries = lengths.next();
      const Work<Config> work(params, item, cta, entries);
      if (work.blocks != 0) keep_query(work);
      if (before != params.items) finish(before, entries_before);
      before = item;
      entries_before = entries;
    });
    if (before != params.items) finish(before, entries_before);
    // The Tensor Core's last signal of this kind; in a pair the value warp waits for it.
    if constexpr (Config::kCtas == 1) storage.q_free.wait(q_parity ^ 1u);
  }

  __device__ __forceinline__ void finish(uint32_t item, int32_t entries) {
    const Work<Config> work(params, item, cta, entries);
    float factor = 1.f;
    if constexpr (!Config::kSplit) {
      storage.stats_ready.wait(stats_parity);
      stats_parity ^= 1u;
      factor = storage.output_factor[row];
      storage.stats_free.arrive();
    }
    if (work.blocks != 0) {
      storage.o_full.wait(o_parity);
      o_parity ^= 1u;
      sm100::fence_after_sync();
    }
    store(work, factor);
  }

  // The tiles that stay in shared memory, of a CTA by itself. In a pair the value warp brings them.
  __device__ __forceinline__ void load_query(const Work<Config>& work) {
    if (warp == 0 && lane == 0) {
      storage.q_full.arrive_and_expect(sizeof(storage.q));
      for (int tile = 0; tile < Config::kSharedTiles; ++tile) {
        tma_load_4d(storage.q[tile], q_map, storage.q_full, (Config::kFirstSharedTile + tile) * sm100::kTileColumns,
                    work.first_head, work.query, work.batch);
      }
    }
    __syncwarp();
  }

  // Both halves of the lanes get the CTA's heads.
  __device__ __forceinline__ void keep_query(const Work<Config>& work) {
    storage.q_free.wait(q_parity ^ 1u);
    if constexpr (Config::kCtas == 1) load_query(work);
    storage.q_staged.wait(q_parity);
    q_parity ^= 1u;
    sm100::fence_after_sync();
    const uint32_t tmem = sm100::tmem_lane(storage.tmem + Config::kQueryColumn, warp * 32);
#pragma unroll 1
    for (int tile = 0; tile < Config::kTmemTiles; ++tile) {
      const uint32_t at = (stage + tile / Config::kStageTiles) % Config::kStages;
      const uint8_t* staged = storage.stages[at] + tile % Config::kStageTiles * sm100::kTileBytes;
      uint32_t words[Config::kQueryTileColumns];
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        const uint4 four = *reinterpret_cast<const uint4*>(staged + swizzle_128(row, chunk));
        words[4 * chunk] = four.x, words[4 * chunk + 1] = four.y;
        words[4 * chunk + 2] = four.z, words[4 * chunk + 3] = four.w;
      }
      sm100::tmem_store(tmem + tile * Config::kQueryTileColumns, words);
    }
    sm100::wait_stores();
    sm100::fence_before_sync();
    arrive_at_leader(storage.q_ready, cta, lane);
    if (lane == 0) storage.q_kept.arrive();
    named_barrier_sync(kStagesRead, Config::kEpilogueThreads);
    if (warp == 0 && lane < Config::kQueryStages) storage.free[(stage + lane) % Config::kStages].arrive();
    stage = (stage + Config::kQueryStages + work.blocks % Config::kStages * Config::kBlockStages) % Config::kStages;
  }

  __device__ __forceinline__ void store(const Work<Config>& work, float factor) {
    const uint32_t tmem = sm100::tmem_lane(storage.tmem + Config::kOutputColumn, warp * 32);
    const int quad_lane = static_cast<int>(lane % 4);
    const int32_t first_head = work.first_head + static_cast<int32_t>(row - quad_lane);
    uint8_t* line = params.out + work.batch * params.out_batch_bytes + work.query * params.out_query_bytes +
                    first_head * params.out_head_bytes + quad_lane * 16;
#pragma unroll 1
    for (uint32_t column = 0; column < Config::kOutputColumns; column += kColumns) {
      float values[kColumns] = {};
      if (work.blocks != 0) {
        sm100::tmem_load(values, tmem + column);
        sm100::wait_loads();
        if (column + kColumns == Config::kOutputColumns) {
          sm100::fence_before_sync();
          arrive_at_leader(storage.o_free, cta, lane);
        }
      }
      if constexpr (Config::kSplit) {
        leave_columns(values, column);
      } else {
        store_columns(values, factor, line + Config::channel(side, column) * sizeof(Element), first_head);
      }
    }
  }

  __device__ __forceinline__ void leave_columns(const float (&values)[kColumns], uint32_t column) {
    float* line = leavings(storage).output[row] + Config::channel(side, column);
#pragma unroll
    for (uint32_t i = 0; i < kColumns; i += 4) {
      *reinterpret_cast<float4*>(line + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  }

  // After everything is left: what the cluster makes of it, in which entries play no part.
  __device__ __forceinline__ void merge() {
    for_each_item(params, cta, [&](uint32_t item) {
      merge_parts<Element>(storage, params, Work<Config>(params, item, cta, 0), cta);
    });
  }

  // The four lanes of a quad have a head each. They exchange pieces of 16 bytes, so that each stores its piece of all
  // four and the quad 64 bytes side by side.
  __device__ __forceinline__ void store_columns(const float (&values)[kColumns], float factor, uint8_t* line,
                                                int32_t first_head) {
    uint32_t words[4][4];  // of a piece, by piece
#pragma unroll
    for (int word = 0; word < 4; ++word) {
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        const int i = piece * 8 + word * 2;
        words[word][piece] =
            factor < 0.f ? 0u : pack_pair<Element>(values[i] * factor, values[i + 1] * factor);
      }
      quad_transpose(words[word], static_cast<int>(lane % 4));
    }
#pragma unroll
    for (int head = 0; head < 4; ++head) {
      if (first_head + head < params.h_q) {
        *reinterpret_cast<uint4*>(line + head * params.out_head_bytes) =
            make_uint4(words[0][head], words[1][head], words[2][head], words[3][head]);
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
