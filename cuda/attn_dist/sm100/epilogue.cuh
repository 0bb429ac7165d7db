// The epilogue warps: exponentials, their sum over heads, and the row. A thread has one entry of a block: its lane of
// Tensor Memory holds the products of the entry's key with all heads.
#pragma once

#include "../../common/math.cuh"
#include "../../common/registers.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../../common/sm100/vector_math.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Epilogue {
  static constexpr float kLeastDivisor = 1e-10f;
  static constexpr int kStep = Config::kHeadStep;

  Storage<Config>& storage;
  const Parameters& params;
  const int rank;  // of this CTA in its pair
  const int warp = threadIdx.x / 32 % Config::kEpilogueWarps;
  const int lane = threadIdx.x % 32;
  HeadBlockRing<Config> head_blocks;
  Ring<Config::kAccumulators> accumulators;
  uint32_t rows = 0;  // normalised so far

  __device__ __forceinline__ Epilogue(Storage<Config>& storage, const Parameters& params, int rank)
      : storage(storage), params(params), rank(rank), head_blocks(storage) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const HeadBlock head_block = head_blocks.wait();
      __syncwarp();
      if (lane == 0) head_blocks.release();
      head_blocks.advance();
      if (head_block.last()) break;
      if (!head_block.empty()) sum_up(head_block);
      if (head_block.first_head == 0) clear_rest(head_block);
    }
  }

  __device__ __forceinline__ int32_t entry_of(int32_t block) const {
    return block * Config::kTileKeys + rank * Config::kCtaKeys + warp * 32 + lane;
  }

  __device__ __forceinline__ void sum_up(const HeadBlock& head_block) {
    keep_lse(head_block);
    float written = 0.f;
    for (int32_t block = head_block.begin_block; block < head_block.end_block; ++block) {
      const int32_t entry = entry_of(block);
      const bool valid = head_block.entries.is_valid(head_block.entries.token(entry));
      float sum = take_block(head_block, __any_sync(0xffffffffu, valid));
      if (!valid) sum = 0.f;
      if (entry < params.topk) {
        if (head_block.first_head != 0) sum += __ldcg(head_block.dist + entry);
        __stcg(head_block.dist + entry, sum);
        written += sum;
      }
    }
    if (params.normalize != 0 && head_block.first_head + head_block.heads == params.h_q) divide(head_block, written);
  }

  // This warp's copy of the head block's lse; heads that do not exist have weight 0.
  __device__ __forceinline__ void keep_lse(const HeadBlock& head_block) {
    __syncwarp();
    for (int head = lane; head < Config::kHeads; head += 32) {
      const bool exists = head < head_block.heads;
      const float lse =
          exists ? __ldg(head_block.lse + (head_block.first_head + head) * params.lse_head) : positive_infinity();
      const Log2Lse log2 = log2_lse(lse, params.unit, params.unit_rest);
      storage.minus_lse[warp][head] = -log2.rounded;
      storage.factor[warp][head] = log2.factor;
    }
    __syncwarp();
  }

  // The sum over heads of this thread's entry of the next block; of a block that the warp has no use for, zero.
  __device__ __forceinline__ float take_block(const HeadBlock& head_block, bool wanted) {
    storage.done[accumulators.stage].wait(accumulators.full);
    sm100::fence_after_sync();
    const float sum = wanted ? sum_heads(head_block.heads) : 0.f;
    sm100::fence_before_sync();
    __syncwarp();
    if (lane == 0) arrive_taken();
    accumulators.advance();
    return sum;
  }

  __device__ __forceinline__ void arrive_taken() {
    Mbarrier& taken = storage.taken[accumulators.stage];
    if constexpr (Config::kCtas == 2) {
      cluster_arrive_after_reads_at(cluster_address(smem_address(&taken.state), 0));
    } else {
      taken.arrive();
    }
  }

  // The next heads come in while these are summed up.
  __device__ __forceinline__ float sum_heads(int32_t heads) const {
    const uint32_t place =
        sm100::tmem_lane(storage.tmem + accumulators.stage * Config::kHeads, static_cast<uint32_t>(warp) * 32);
    float even[kStep], odd[kStep];
    float2 sums[2] = {};
    sm100::tmem_load(even, place);
    for (int32_t first = 0;; first += 2 * kStep) {
      arrived(even);
      const bool more = first + kStep < heads;
      if (more) sm100::tmem_load(odd, place + first + kStep);
      add_heads(even, first, heads, sums);
      if (!more) break;
      arrived(odd);
      const bool again = first + 2 * kStep < heads;
      if (again) sm100::tmem_load(even, place + first + 2 * kStep);
      add_heads(odd, first + kStep, heads, sums);
      if (!again) break;
    }
    const float2 sum = sm100::add(sums[0], sums[1]);
    return sum.x + sum.y;
  }

  __device__ __forceinline__ void arrived(float (&products)[kStep]) const {
    sm100::wait_loads();
    // Nothing that needs the products may move ahead of the wait.
#pragma unroll
    for (int i = 0; i < kStep; ++i) make_opaque(products[i]);
  }

  // Adds the weights of `kStep` heads from `first` on, of which there are `heads`.
  __device__ __forceinline__ void add_heads(float (&products)[kStep], int32_t first, int32_t heads,
                                            float2 (&sums)[2]) const {
    if (heads - first < kStep) {
      // Q of absent heads is zero, their lse +inf; but zero times a key's infinity is NaN.
#pragma unroll
      for (int i = 0; i < kStep; ++i) products[i] = first + i < heads ? products[i] : 0.f;
    }
    const float4* minus_lse = reinterpret_cast<const float4*>(storage.minus_lse[warp] + first);
    const float4* factors = reinterpret_cast<const float4*>(storage.factor[warp] + first);
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i) {
      const float4 lse = minus_lse[i], factor = factors[i];
      const float2 low = make_float2(products[4 * i], products[4 * i + 1]);
      const float2 high = make_float2(products[4 * i + 2], products[4 * i + 3]);
      sums[0] = sm100::multiply_add(powers(low, make_float2(lse.x, lse.y)), make_float2(factor.x, factor.y), sums[0]);
      sums[1] = sm100::multiply_add(powers(high, make_float2(lse.z, lse.w)), make_float2(factor.z, factor.w), sums[1]);
    }
  }

  // Weights but for their heads' factors.
  __device__ __forceinline__ float2 powers(float2 product, float2 minus_lse) const {
    const float2 scale = make_float2(params.scale_log2, params.scale_log2);
    const float2 exponent = sm100::multiply_add(product, scale, minus_lse);
    return make_float2(exp2_approx(exponent.x), exp2_approx(exponent.y));
  }

  // Zeros past the blocks that can have valid entries.
  __device__ __forceinline__ void clear_rest(const HeadBlock& head_block) const {
    for (int32_t block = head_block.end_block; block < head_block.row_end_block; ++block) {
      const int32_t entry = entry_of(block);
      if (entry < params.topk) __stcg(head_block.dist + entry, 0.f);
    }
  }

  // Divides the row by its sum. Each thread reads what it wrote itself.
  __device__ __forceinline__ void divide(const HeadBlock& head_block, float written) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) written += __shfl_xor_sync(0xffffffffu, written, mask);
    auto& mass = storage.mass[rows & 1u];
    if (lane < Config::kCtas) {
      cluster_store_float(cluster_address(smem_address(&mass[rank * Config::kEpilogueWarps + warp]), lane), written);
      cluster_arrive_at(cluster_address(smem_address(&storage.mass_ready.state), lane));
    }
    __syncwarp();
    cluster_wait_at(storage.mass_ready, rows & 1u);
    ++rows;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < Config::kCtas * Config::kEpilogueWarps; ++i) total += mass[i];
    const float divisor = max_nan(total, kLeastDivisor);
    for (int32_t block = head_block.begin_block; block < head_block.end_block; ++block) {
      const int32_t entry = entry_of(block);
      if (entry < params.topk) __stcg(head_block.dist + entry, __ldcg(head_block.dist + entry) / divisor);
    }
  }
};

}  // namespace cupymla::attn_dist
