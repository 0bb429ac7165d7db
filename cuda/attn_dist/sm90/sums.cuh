// From scores to the row of the distribution: sums over all heads, and where they go.
#pragma once

#include "head_sums.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

// The part of a consumer warp in sums over heads. Warps are counted over both consumers; blocks of a row are assigned
// in turn to those that sum over their heads, and the lanes of a warp take entries `lane` and `lane + 32` of each, so
// that every element of a row is written by one thread alone.
template <typename Config>
struct Sums {
  static constexpr int kScores = HeadSums::kScores;

  Storage<Config>& storage;
  const Parameters& params;
  const int warp;
  const int lane;
  const HeadSums heads{lane};
  uint32_t round = 0;   // of sums_ready
  uint32_t masses = 0;  // rounds of masses_ready, where kAlternate

  // The first block of a row that this warp writes, of those of its own consumer where that takes every second one.
  __device__ __forceinline__ int32_t first_owned() const {
    return Config::kAlternate ? warp % 4 * 2 + warp / 4 : warp;
  }
  __device__ __forceinline__ bool owns(int32_t block) const { return block % Config::kWarps == first_owned(); }
  __device__ __forceinline__ int group() const { return Config::kAlternate ? warp / 4 : 0; }

  // The lse of the warp's heads from `first_head` on, one per lane.
  __device__ __forceinline__ float read_lse(const HeadBlock& head_block, int32_t first_head) const {
    return heads.read_lse(head_block.lse + first_head * params.lse_head, params.lse_head, params.h_q - first_head);
  }

  // Keeps them for the head block that begins: the warp is through with the blocks of the one before.
  __device__ __forceinline__ void keep_lse(float lse) {
    __syncwarp();
    heads.keep_lse(storage.lse[warp], lse, params);
  }

  // As `HeadSums::sum`, in the present head block.
  __device__ __forceinline__ void sum_heads(float (&scores)[kScores], int32_t count, float (&sums)[2]) const {
    heads.sum(scores, count, storage.lse[warp], params.scale_log2, sums);
  }

  // Waits until the sums of the last round are out.
  __device__ __forceinline__ void wait() const { storage.sums_ready[group()].wait((round - 1) & 1u); }

  // Gives out this warp's sums. It must have waited for the round before.
  __device__ __forceinline__ void publish(const float (&sums)[2]) {
    float* place = &storage.sums[group()][round & 1u][warp % Config::kPartialSums][heads.column()];
    *reinterpret_cast<float2*>(place) = make_float2(sums[0], sums[1]);
    storage.sums_ready[group()].arrive();
    ++round;
  }

  // Adds up what all warps gave out in the last round, in a fixed order, and writes it to the row.
  __device__ __forceinline__ void add_up(const HeadBlock& head_block, int32_t block) {
    if (!owns(block)) return;
    const auto& given = storage.sums[group()][(round - 1) & 1u];
    float written = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t entry = block * Config::kTileKeys + half * 32 + lane;
      float sum = 0.f;
#pragma unroll
      for (int addend = 0; addend < Config::kPartialSums; ++addend) sum += given[addend][half * 32 + lane];
      if (entry < params.topk) {
        if (head_block.first_head != 0) sum += __ldcg(head_block.dist + entry);
        __stcg(head_block.dist + entry, sum);
        written += sum;
      }
    }
    if (normalizes(head_block)) {
      const bool first = block - head_block.begin_block < Config::kWarps;
      float& mass = storage.mass[mass_set()][warp][lane];
      mass = first ? written : mass + written;
    }
  }

  // Whether the row is to be divided by its sum once the head block is through.
  __device__ __forceinline__ bool normalizes(const HeadBlock& head_block) const {
    return params.normalize != 0 && params.h_q - head_block.first_head <= Config::kHeads;
  }

  // Where all warps sum over the same entries' heads, nobody is a row ahead of another: one set is enough, and a round
  // of sums_ready is spared a count in registers.
  __device__ __forceinline__ uint32_t mass_set() const { return Config::kAlternate ? masses & 1u : 0u; }

  // Waits until every warp has its share of the row's sum out.
  __device__ __forceinline__ void share_masses() {
    if constexpr (Config::kAlternate) {
      storage.masses_ready.arrive();
      storage.masses_ready.wait(masses & 1u);
      ++masses;
    } else {
      storage.sums_ready[0].arrive();
      ++round;
      wait();
    }
  }

  // Zeros past the blocks that can have valid entries.
  __device__ __forceinline__ void clear_rest(const HeadBlock& head_block) const {
    for (int32_t block = head_block.end_block; block < head_block.row_end_block; ++block) {
      if (!owns(block)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t entry = block * Config::kTileKeys + half * 32 + lane;
        if (entry < params.topk) __stcg(head_block.dist + entry, 0.f);
      }
    }
  }

  // Divides the row by its sum. Each thread reads what it wrote itself.
  __device__ __forceinline__ void divide(const HeadBlock& head_block) {
    auto& mass = storage.mass[mass_set()];
    if (first_owned() >= head_block.end_block) mass[warp][lane] = 0.f;
    share_masses();
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < Config::kWarps; ++other) total += mass[other][lane];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
    const float divisor = max_nan(total, kLeastDivisor);
    for (int32_t block = first_owned(); block < head_block.row_end_block; block += Config::kWarps) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t entry = block * Config::kTileKeys + half * 32 + lane;
        if (entry < params.topk) __stcg(head_block.dist + entry, __ldcg(head_block.dist + entry) / divisor);
      }
    }
  }
};

}  // namespace cupymla::attn_dist
