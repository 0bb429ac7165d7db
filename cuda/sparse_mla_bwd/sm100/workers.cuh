// The two worker warpgroups. A thread's lane of Tensor Memory is a head: of it a thread works out P and dS in 16 slots.
#pragma once

#include "../../common/cluster_exchange.cuh"
#include "../../common/dot.cuh"
#include "../../common/math.cuh"
#include "../../common/reduction.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sparse_query.cuh"
#include "../params.cuh"
#include "../sink.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Config, typename Element>
struct Worker {
  static constexpr int kColumns = Config::kOwnColumns;

  Storage<Config>& storage;
  const Parameters& params;
  const int rank = static_cast<int>(cluster_rank());
  const int group = threadIdx.x / Config::kWarpgroup;
  const int warp = (threadIdx.x / 32) % 4;  // in its warpgroup
  const int lane = threadIdx.x % 32;
  const int row = warp * 32 + lane;         // this thread's head, in the pass
  const uint32_t tmem = sm100::tmem_lane(storage.tmem, warp * 32);
  const int own_slot = rank * Config::kOwnSlots + group * kColumns;          // the first that this thread finishes
  const int other_slot = (1 - rank) * Config::kOwnSlots + group * kColumns;  // the first that its twin does

  float lse, share, delta;  // of the head; lse in units of log2, +inf where there is no head
  bool has_head;
  bool occupied;  // whether a block of this pass had a valid slot
  uint32_t parity = 0, pass_parity = 0;

  __device__ __forceinline__ Worker(Storage<Config>& storage, const Parameters& params)
      : storage(storage), params(params) {}

  // One arrival for the warp at a barrier of each CTA; publishes the warp's accesses to the cluster.
  __device__ __forceinline__ void arrive_at_both(Mbarrier& barrier) const {
    __syncwarp();
    if (lane < Config::kCluster) cluster_arrive_at(cluster_address(smem_address(&barrier), lane));
  }

  // Before a pass's first block. Q and dO are in shared memory from here on.
  __device__ __forceinline__ void begin_pass(const QueryPosition& query, int32_t first_head) {
    const int64_t batch = query.batch, token = query.query;
    const int32_t head = first_head + row;
    has_head = head < params.h_q;
    occupied = false;
    lse = positive_infinity();
    share = 1.f;
    if (has_head) {
      lse = params.lse[batch * params.lse_batch + token * params.lse_query + head * params.lse_head] *
            params.lse_to_log2;
      if (params.attn_sink != nullptr) {
        share = left_share(params.attn_sink[head * params.attn_sink_head] * kLog2e - lse);
      }
    }
    storage.heads_full.wait(pass_parity);
    sum_own_channels(query, first_head);
    arrive_at_both(storage.delta_full);
    cluster_wait_at(storage.delta_full, pass_parity);
    delta = storage.delta[0][row] + storage.delta[1][row];
    pass_parity ^= 1u;
  }

  // out * dO over this CTA's value channels, to both CTAs. Eight lanes to a head, each with every eighth 16 bytes.
  __device__ __forceinline__ void sum_own_channels(const QueryPosition& query, int32_t first_head) const {
    constexpr int kWarpHeads = Config::kHeads / Config::kWorkerWarps;
    const int64_t batch = query.batch, token = query.query;
    const uint8_t* out = params.out + batch * params.out_batch_bytes + token * params.out_query_bytes +
                         rank * Config::kOwnTiles * static_cast<int>(kSwizzleRowBytes);
    for (int pass = 0; pass < kWarpHeads / 4; ++pass) {
      const int place = (threadIdx.x / 32) * kWarpHeads + pass * 4 + lane / 8;
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

  // From S and dP of the block in both CTAs to P and dS in both CTAs.
  __device__ __forceinline__ void make_tiles(float* attn_dist, int32_t slots_left) {
    storage.slots_full.wait(parity);
    const uint64_t valid = storage.valid[parity];
    occupied = occupied || valid != 0;
    const uint32_t mask = has_head ? static_cast<uint32_t>(valid >> own_slot) : 0u;
    float probabilities[kColumns], gradients[kColumns];
    sum_over_channels<0>(probabilities);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = exp2_approx(fmaf(probabilities[i], params.scale_log2, -lse));
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
    }
    if (attn_dist != nullptr) add_distribution(attn_dist + own_slot, slots_left - own_slot, probabilities);
    sum_over_channels<1>(gradients);
    arrive_at_both(storage.consumed);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float p = probabilities[i] * share, ds = p * (gradients[i] - delta) * params.sm_scale;
      probabilities[i] = (mask >> i & 1u) != 0 ? p : 0.f;
      gradients[i] = (mask >> i & 1u) != 0 ? ds : 0.f;
    }
    cluster_wait_at(storage.consumed, parity);
    store_to_both(storage.p, probabilities);
    store_to_both(storage.ds, gradients);
    fence_async_cluster();
    arrive_at_both(storage.tiles_full);
  }

  // This thread's 16 slots of S (0) or dP (1): what this CTA's channels give, and the other's, handed over by its twin.
  template <int kWhich>
  __device__ __forceinline__ void sum_over_channels(float (&sums)[kColumns]) const {
    uint32_t own[kColumns], other[kColumns];
    storage.scores_full[kWhich].wait(parity);
    sm100::fence_after_sync();
    const uint32_t scores = tmem + (kWhich == 0 ? Config::kScores : Config::kValueScores);
    sm100::tmem_load_16(other, scores + other_slot);
    sm100::tmem_load_16(own, scores + own_slot);
    sm100::wait_loads();
    sm100::fence_before_sync();

    if (kWhich == 0) cluster_wait_at(storage.tiles_free, parity ^ 1u);
    auto& staging = storage.staging[kWhich];
    const uint32_t twin = cluster_address(smem_address(&staging[0][threadIdx.x]), 1 - rank);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      cluster_store_float4(twin + i * static_cast<uint32_t>(sizeof(staging[0])), __uint_as_float(other[4 * i]),
                           __uint_as_float(other[4 * i + 1]), __uint_as_float(other[4 * i + 2]),
                           __uint_as_float(other[4 * i + 3]));
    }
    __syncwarp();
    if (lane == 0) cluster_arrive_at(cluster_address(smem_address(&storage.received[kWhich]), 1 - rank));
    cluster_wait_at(storage.received[kWhich], parity);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const float4 four = staging[i][threadIdx.x];
      sums[4 * i] = __uint_as_float(own[4 * i]) + four.x;
      sums[4 * i + 1] = __uint_as_float(own[4 * i + 1]) + four.y;
      sums[4 * i + 2] = __uint_as_float(own[4 * i + 2]) + four.z;
      sums[4 * i + 3] = __uint_as_float(own[4 * i + 3]) + four.w;
    }
  }

  // Adds to the distribution what all heads of the pass have in this warpgroup's 16 slots. One thread of one CTA adds
  // to a slot, in each pass.
  __device__ __forceinline__ void add_distribution(float* start, int32_t slots_left,
                                                   const float (&probabilities)[kColumns]) {
    float own = 0.f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float sum = probabilities[i];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      own = lane == i ? sum : own;
    }
    if (lane < kColumns) storage.distribution[group][warp][lane] = own;
    named_barrier_sync(kDistribution + group, Config::kWarpgroup);
    if (row < kColumns && row < slots_left) {
      const auto& sums = storage.distribution[group];
      reduce_add_float(start + row, (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]));
    }
    named_barrier_sync(kDistribution + group, Config::kWarpgroup);
  }

  // 16 slots of this thread's head, rounded, into the tile of either CTA.
  __device__ __forceinline__ void store_to_both(uint8_t* tile, const float (&values)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_pair<Element>(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]);
      uint8_t* place = tile + swizzle_128(row, own_slot / 8 + i);
      *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
      cluster_store_float4(cluster_address(smem_address(place), 1 - rank), __uint_as_float(words[0]),
                           __uint_as_float(words[1]), __uint_as_float(words[2]), __uint_as_float(words[3]));
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
