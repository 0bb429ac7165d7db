// What a worker thread does the same way where heads are many and few. Its lane of Tensor Memory is a row of S and dP;
// it adds up 16 columns of the row over the channels of both CTAs, and hands 16 to its peer, the same thread of the
// other CTA. What goes to the other CTA is counted by a barrier there as it arrives: arrivals that publish ordinary
// stores would fence the whole GPU, and wait for all reductions of the thread.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/math.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"
#include "config.cuh"
#include "pipeline_state.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Storage, typename Element>
struct PairWorker {
  using Config = typename Storage::Config;
  static constexpr int kColumns = Config::kWorkerColumns;
  // From one CTA to the other: of S or dP, and of P and dS together.
  static constexpr uint32_t kPartBytes = Config::kWorkerThreads * kColumns * 4;
  static constexpr uint32_t kTilesBytes = 2 * Config::kWorkerThreads * kColumns * 2;

  Storage& storage;
  const Parameters& params;
  const int rank = static_cast<int>(cluster_rank());
  const int group = threadIdx.x / Config::kWarpgroup;
  const int warp = (threadIdx.x / 32) % 4;  // in its warpgroup
  const int lane = threadIdx.x % 32;
  const int row = warp * 32 + lane;
  const uint32_t tmem = sm100::tmem_lane(storage.tmem, warp * 32);
  const int own_column = rank * Config::kOwnColumns + group * kColumns;          // the first that this thread finishes
  const int other_column = (1 - rank) * Config::kOwnColumns + group * kColumns;  // the first that its peer does
  PipelineState<Config::kSets> state;

  __device__ __forceinline__ PairWorker(Storage& storage, const Parameters& params)
      : storage(storage), params(params) {}

  // One arrival for the warp at a barrier of each CTA. Says what the warp has read or waited for; publishes nothing.
  __device__ __forceinline__ void arrive_at_both(Mbarrier& barrier) const {
    __syncwarp();
    if (lane < Config::kCluster) cluster_arrive_after_reads_at(cluster_address(smem_address(&barrier), lane));
  }

  // The same, and publishes the warp's accesses to the cluster.
  __device__ __forceinline__ void publish_to_both(Mbarrier& barrier) const {
    __syncwarp();
    if (lane < Config::kCluster) cluster_arrive_at(cluster_address(smem_address(&barrier), lane));
  }

  // The query's row of the distribution; null where nobody wants it.
  __device__ __forceinline__ float* distribution_row(const QueryPosition& query) const {
    if (params.attn_dist == nullptr) return nullptr;
    return params.attn_dist + query.batch * params.attn_dist_batch + query.query * params.attn_dist_query;
  }

  // out * dO over this CTA's value channels, to both CTAs. Eight lanes to a head, each with every eighth 16 bytes.
  __device__ __forceinline__ void sum_own_channels(const QueryPosition& query, int32_t first_head) const {
    constexpr int kWarpHeads = Config::kHeads / Config::kWorkerWarps;
    const int64_t batch = query.batch, token = query.query;
    const uint8_t* out = params.out + batch * params.out_batch_bytes + token * params.out_query_bytes +
                         rank * Config::kOwnTiles * static_cast<int>(kSwizzleRowBytes);
    for (int head_block = 0; head_block < kWarpHeads / 4; ++head_block) {
      const int place = (threadIdx.x / 32) * kWarpHeads + head_block * 4 + lane / 8;
      const int32_t head = first_head + place;
      float sum = 0.f;
      if (head < params.h_q) {
        const uint4* left = reinterpret_cast<const uint4*>(out + head * params.out_head_bytes) + lane % 8;
#pragma unroll
        for (int tile = 0; tile < Config::kOwnTiles; ++tile) {
          const uint4 right = *reinterpret_cast<const uint4*>(storage.dout[tile] + swizzle_128(place, lane % 8));
          sum += dot_eight<Element>(__ldg(left + tile * 8), right);
        }
      }
#pragma unroll
      for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (lane % 8 < Config::kCluster) {
        cluster_store_float(cluster_address(smem_address(&storage.delta[rank][place]), lane % 8), sum);
      }
    }
  }

  // This thread's 16 columns of S (0) or dP (1): what this CTA's channels give, and the other's, handed over by its
  // peer, into whose `staging` this thread may write.
  template <int kWhich>
  __device__ __forceinline__ void sum_over_channels(float (&sums)[kColumns]) const {
    uint32_t own[kColumns], other[kColumns];
    storage.scores_full[kWhich].wait(state.parity());
    sm100::fence_after_sync();
    const uint32_t scores = tmem + (kWhich == 0 ? Config::kScores : Config::kValueScores);
    sm100::tmem_load_16(other, scores + other_column);
    sm100::tmem_load_16(own, scores + own_column);
    sm100::wait_loads();
    sm100::fence_before_sync();

    auto& staging = storage.staging[kWhich];
    const uint32_t peer = cluster_address(smem_address(&staging[0][threadIdx.x]), 1 - rank);
    const uint32_t received = cluster_address(smem_address(&storage.received[kWhich]), 1 - rank);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      cluster_store_async_float4(peer + i * static_cast<uint32_t>(sizeof(staging[0])), __uint_as_float(other[4 * i]),
                                 __uint_as_float(other[4 * i + 1]), __uint_as_float(other[4 * i + 2]),
                                 __uint_as_float(other[4 * i + 3]), received);
    }
    if (threadIdx.x == 0) storage.received[kWhich].arrive_and_expect(kPartBytes);
    storage.received[kWhich].wait(state.parity());
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const float4 four = staging[i][threadIdx.x];
      sums[4 * i] = __uint_as_float(own[4 * i]) + four.x;
      sums[4 * i + 1] = __uint_as_float(own[4 * i + 1]) + four.y;
      sums[4 * i + 2] = __uint_as_float(own[4 * i + 2]) + four.z;
      sums[4 * i + 3] = __uint_as_float(own[4 * i + 3]) + four.w;
    }
  }

  // P and dS, rounded, into the tiles of either CTA.
  __device__ __forceinline__ void store_tiles(const float (&probabilities)[kColumns],
                                              const float (&gradients)[kColumns]) const {
    store_to_both(storage.p, probabilities);
    store_to_both(storage.ds, gradients);
    fence_async_shared();
    __syncwarp();
    // The other CTA's share counts by its bytes; its arrivals say that it has read what was handed over to it.
    if (threadIdx.x == 0) {
      storage.tiles_full.arrive_and_expect(kTilesBytes);
    } else if (lane == 0) {
      storage.tiles_full.arrive();
    }
    if (lane == 1) cluster_arrive_after_reads_at(cluster_address(smem_address(&storage.tiles_full), 1 - rank));
  }

  // This thread's 16 columns of its row, rounded, into the tile of either CTA.
  __device__ __forceinline__ void store_to_both(uint8_t* tile, const float (&values)[kColumns]) const {
    const uint32_t full = cluster_address(smem_address(&storage.tiles_full), 1 - rank);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_pair<Element>(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
      uint8_t* place = tile + swizzle_128(row, own_column / 8 + i);
      *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
      cluster_store_async_float4(cluster_address(smem_address(place), 1 - rank), __uint_as_float(words[0]),
                                 __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3]), full);
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
