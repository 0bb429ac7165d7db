// Putting the parts of a unit together: those of a CTA's warps in its shared memory, those of a cluster's CTAs in the
// shared memory of whoever puts a slice of the channels together, those of several clusters in global memory.
//
// Of a row of parts, lane l knows the statistics of part l % kParts. Of the sums, kSlice lanes stand for the vectors of
// a slice and the groups of kSlice lanes for the parts, so that a warp's loads are all under way at once.
//
// Where several clusters share a unit, the warps of the same number in CTAs of the same rank leave the rows of their
// slices to the last of them to arrive. Their counter is at zero again then, for the next launch: that begins when this
// one has ended.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/counter.cuh"
#include "../sm80/merge.cuh"
#include "cluster_split.cuh"

namespace cupymla::xl_paged_attention {

constexpr uint32_t kSharedCtas = 96;  // CTAs of one cluster each of all units that several share, at most
constexpr uint32_t kJoinCounters = kSharedCtas * kWarps;

template <typename Config>
struct Join {
  using Part = typename Config::Part;
  static constexpr int kVectors = Config::kVectors;
  static constexpr int kSlice = Config::kSlice;
  static constexpr int kGroups = 32 / kSlice;   // parts that lanes stand for
  static constexpr int kMostClusters = 16;      // of a unit
  static_assert(kWarps == 4 && kCluster <= 32 && kMostClusters <= 32, "steps of shuffles");

  const Parameters& params;
  Storage<Config>& storage;
  const Merge<Config>& merge;  // for what becomes of a result
  const Segment& segment;
  const UnitAssignment& assignment;
  const uint32_t rank = cluster_rank();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int vector = static_cast<int>(rank) * kSlice + lane % kSlice;  // of the row; may lie past it

  // A row of parts put together.
  struct Row {
    float4 sum;  // of this lane's vector
    float top, total;
  };

  // Parts at equal distances, in shared memory or in global memory.
  struct Parts {
    const Part* first;
    int step, count;
  };

  // What weighs the parts of a row.
  struct Weights {
    float top, total;
    float own;  // of part lane % kParts
  };

  // By a warp; `known`: maximum and sum of part lane % kCount, -inf and 0 where there is none.
  template <int kCount>
  static __device__ __forceinline__ Weights weigh(float2 known) {
    Weights weights;
    weights.top = known.x;
#pragma unroll
    for (int step = 1; step < kCount; step *= 2) {
      weights.top = max_nan(weights.top, __shfl_xor_sync(kFullWarp, weights.top, step));
    }
    weights.own = Merge<Config>::accurate_weight(known.x, weights.top);
    weights.total = known.y * weights.own;
#pragma unroll
    for (int step = 1; step < kCount; step *= 2) {
      weights.total += __shfl_xor_sync(kFullWarp, weights.total, step);
    }
    return weights;
  }

  static __device__ __forceinline__ void add(float4& sum, float4 found, float weight) {
    sum.x = fmaf(found.x, weight, sum.x);
    sum.y = fmaf(found.y, weight, sum.y);
    sum.z = fmaf(found.z, weight, sum.z);
    sum.w = fmaf(found.w, weight, sum.w);
  }

  // By a warp.
  template <int kParts>
  __device__ __forceinline__ Row put_together(const Parts& parts, int row) const {
    constexpr int kLoads = divide_up(kParts, kGroups);
    const int own = lane % kParts;
    float2 known = {negative_infinity(), 0.0f};
    if (own < parts.count) known = *reinterpret_cast<const float2*>(&parts.first[own * parts.step].statistics[row]);
    float4 found[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int part = i * kGroups + lane / kSlice;
      found[i] = float4{};
      if (part < parts.count && vector < kVectors) found[i] = parts.first[part * parts.step].sums[row][lane % kSlice];
    }
    const Weights weights = weigh<kParts>(known);
    Row made{float4{}, weights.top, weights.total};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Lanes past the parts have sums of zero, whatever the weight that comes with them is: it may be NaN only where
      // the row is.
      const float weight = __shfl_sync(kFullWarp, weights.own, (i * kGroups + lane / kSlice) % kParts);
      add(made.sum, found[i], weight);
    }
#pragma unroll
    for (int step = kSlice; step < 32; step *= 2) {
      made.sum.x += __shfl_xor_sync(kFullWarp, made.sum.x, step);
      made.sum.y += __shfl_xor_sync(kFullWarp, made.sum.y, step);
      made.sum.z += __shfl_xor_sync(kFullWarp, made.sum.z, step);
      made.sum.w += __shfl_xor_sync(kFullWarp, made.sum.w, step);
    }
    return made;
  }

  // All threads, once: `delivered` gets what the CTAs of the cluster will send.
  __device__ __forceinline__ void expect() const {
    if (threadIdx.x == 0) {
      storage.delivered.init(1);
      fence_mbarrier_init();
      const int vectors = max(0, min(kSlice, kVectors - static_cast<int>(rank) * kSlice));
      storage.delivered.arrive_and_expect(static_cast<uint32_t>(kCluster * segment.rows * (vectors + 1) * 16));
    }
    cluster_arrive_relaxed();
  }

  // All threads of the cluster, each warp's tiles done.
  template <typename Engine>
  __device__ __forceinline__ void finish(Engine& engine) const {
    engine.store_statistics();
    __syncwarp();  // the ring has been read
    engine.store_columns(reinterpret_cast<float*>(storage.ring[warp][0]), segment.rows, 0, Config::kColumns,
                         [](int) { return 1.0f; });
    const float scale = merge.v_scale();
    const int clusters = static_cast<int>(assignment.ctas) / kCluster;
    Part* const buffers = reinterpret_cast<Part*>(params.partials) +
                        (static_cast<int64_t>(assignment.index) * clusters * kCluster + rank);
    Part& own = buffers[assignment.cta / kCluster * kCluster];
    __syncthreads();
    cluster_wait();
#pragma unroll 1
    for (int row = warp; row < segment.rows; row += kWarps) send(row);
    storage.delivered.wait(0);
    const Parts received{storage.received, 1, kCluster};
#pragma unroll 1
    for (int row = warp; row < segment.rows; row += kWarps) {
      const Row made = put_together<kCluster>(received, row);
      if (clusters == 1) {
        store_result(row, made, scale);
      } else {
        if (lane < kSlice) own.sums[row][lane] = made.sum;
        if (lane == 0) own.statistics[row] = {made.top, made.total, 0.0f, 0.0f};
      }
    }
    if (clusters > 1 && is_last(clusters)) {
      const Parts left{buffers, kCluster, clusters};
#pragma unroll 1
      for (int row = warp; row < segment.rows; row += kWarps) {
        store_result(row, put_together<kMostClusters>(left, row), scale);
      }
    }
  }

 private:
  __device__ __forceinline__ void store_result(int row, const Row& made, float scale) const {
    if (lane < kSlice && vector < kVectors) merge.store_out(row, 4 * vector, made.sum, made.total, scale);
    if (lane == 0 && rank == 0) merge.store_lse(row, made.top, made.total);
  }

  // A row of the four warps, put together and sent to the CTAs of the cluster: to each its slice and the statistics.
  __device__ __forceinline__ void send(int row) const {
    const int other = lane % kWarps;
    const Weights weights = weigh<kWarps>({storage.row_max[other][row], storage.row_sum[other][row]});
    float factors[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) factors[i] = __shfl_sync(kFullWarp, weights.own, i);
    const uint32_t delivered = smem_address(&storage.delivered.state);
#pragma unroll
    for (int first = 0; first < kVectors; first += 32) {
      const int assignment = first + lane;
      if (assignment >= kVectors) break;
      float4 sum = {};
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        const float* const sums = reinterpret_cast<const float*>(storage.ring[i][0]) + row * Config::kColumns;
        add(sum, reinterpret_cast<const float4*>(sums)[assignment], factors[i]);
      }
      const uint32_t to = assignment / kSlice;
      const uint32_t address = smem_address(&storage.received[rank].sums[row][assignment % kSlice]);
      cluster_store_async_float4(cluster_address(address, to), sum.x, sum.y, sum.z, sum.w,
                                 cluster_address(delivered, to));
    }
    if (lane < kCluster) {
      const uint32_t address = smem_address(&storage.received[rank].statistics[row]);
      cluster_store_async_float4(cluster_address(address, lane), weights.top, weights.total, 0.0f, 0.0f,
                                 cluster_address(delivered, lane));
    }
  }

  // By a warp: whether it is the last of those that leave the same rows of the same slice.
  __device__ __forceinline__ bool is_last(int clusters) const {
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) {
      uint32_t* const counter =
          params.arrivals + kArrivalsBytes / 4 + (assignment.index * kCluster + rank) * kWarps + warp;
      before = arrive_in_rounds(counter, static_cast<uint32_t>(clusters));
    }
    before = __shfl_sync(kFullWarp, before, 0);
    __syncwarp();  // what lane 0 has seen, all of them see
    return before == static_cast<uint32_t>(clusters) - 1;
  }
};

}  // namespace cupymla::xl_paged_attention
