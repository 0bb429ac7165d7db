// From scores to the row of the distribution: exponentials, their sum over heads, and where it goes.
#pragma once

#include "../../common/math.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

// The part of a consumer warp in sums over heads. Warps are counted over both consumers; blocks of a row are dealt to
// them in turn, and the lanes of a warp take slots `lane` and `lane + 32` of each, so that every element of a row is
// written by one thread alone.
template <typename Config>
struct Sums {
  static constexpr int kTiles = Config::kColumns / 8;  // groups of eight columns in an accumulator
  static constexpr int kScores = 4 * kTiles;
  static constexpr float kLeastDivisor = 1e-10f;

  Storage<Config>& storage;
  const Parameters& params;
  const int warp;
  const int lane;
  uint32_t round = 0;  // of sums_ready

  __device__ __forceinline__ bool owns(int32_t block) const { return block % Config::kWarps == warp; }

  // Reads the lse of the warp's sixteen heads, as the caller gave it, one per lane; +inf where there is no head.
  __device__ __forceinline__ float read_lse(const Pass& pass, int32_t first_head) const {
    const int32_t head = first_head + lane;
    return lane < 16 && head < params.h_q ? __ldg(pass.lse + head * params.lse_head) : positive_infinity();
  }

  // Keeps them in shared memory, to spare registers, while those of the pass before are still in use.
  __device__ __forceinline__ void keep_lse(float lse, uint32_t pass) {
    if (lane < 16) storage.lse[pass & 1u][warp][lane] = log2_lse(lse, params.unit, params.unit_rest);
    __syncwarp();
  }

  // Products of the warp's sixteen heads, of which `heads` exist -> each lane's two sums over them, of columns
  // `column()` and the one after it.
  __device__ __forceinline__ void sum_heads(float (&scores)[kScores], int32_t heads, uint32_t pass,
                                            float (&sums)[2]) const {
    if (heads < 16) {
      // Their Q is zero, their lse +inf; but zero times a key's infinity is NaN.
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (lane / 4 + i % 4 / 2 * 8 >= heads) scores[i] = 0.f;
      }
    }
    const Log2Lse low = storage.lse[pass & 1u][warp][lane / 4], high = storage.lse[pass & 1u][warp][lane / 4 + 8];
    float column_sums[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int first = i / 2 * 4 + i % 2;
      column_sums[i] = fmaf(power(scores[first + 2], high), high.factor, power(scores[first], low) * low.factor);
    }
    add_lanes<2 * kTiles, 16>(column_sums);
    sums[0] = column_sums[0];
    sums[1] = column_sums[1];
  }

  // A weight but for its head's factor.
  __device__ __forceinline__ float power(float product, const Log2Lse& lse) const {
    return exp2_approx(fmaf(product, params.scale_log2, -lse.rounded));
  }

  // Sums over the eight lanes that hold the same columns, halving what each holds until two columns are left.
  template <int kCount, int kMask, int kAll>
  __device__ __forceinline__ void add_lanes(float (&values)[kAll]) const {
    if constexpr (kMask >= 4) {
      if constexpr (kCount > 2) {
        const bool upper = (lane & kMask) != 0;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
          const float kept = upper ? values[i + kCount / 2] : values[i];
          const float given = upper ? values[i] : values[i + kCount / 2];
          values[i] = kept + __shfl_xor_sync(0xffffffffu, given, kMask);
        }
        add_lanes<kCount / 2, kMask / 2>(values);
      } else {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], kMask);
        values[1] += __shfl_xor_sync(0xffffffffu, values[1], kMask);
        add_lanes<kCount, kMask / 2>(values);
      }
    }
  }

  // The first of the two columns that `sum_heads` leaves to this lane; whether another lane has them as well.
  __device__ __forceinline__ int column() const {
    return lane / (Config::kColumns == 64 ? 4 : 8) * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ bool repeats() const { return Config::kColumns != 64 && (lane & 4) != 0; }

  // Waits until the sums of the last round are out.
  __device__ __forceinline__ void wait() const { storage.sums_ready.wait((round - 1) & 1u); }

  // Gives out this warp's sums. All warps must have waited for the round before.
  __device__ __forceinline__ void publish(const float (&sums)[2], uint32_t first_column) {
    if (!repeats()) {
      float* place = &storage.sums[round & 1u][warp % Config::kPartialSums][first_column + column()];
      *reinterpret_cast<float2*>(place) = make_float2(sums[0], sums[1]);
    }
    storage.sums_ready.arrive();
    ++round;
  }

  // Adds up what all warps gave out in the last round, in a fixed order, and writes it to the row.
  __device__ __forceinline__ void add_up(const Pass& pass, int32_t block) {
    if (!owns(block)) return;
    const auto& given = storage.sums[(round - 1) & 1u];
    float written = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t slot = block * Config::kSlots + half * 32 + lane;
      float sum = 0.f;
#pragma unroll
      for (int addend = 0; addend < Config::kPartialSums; ++addend) sum += given[addend][half * 32 + lane];
      if (slot < params.topk) {
        if (pass.first_head != 0) sum += __ldcg(pass.dist + slot);
        __stcg(pass.dist + slot, sum);
        written += sum;
      }
    }
    if (normalizes(pass)) {
      const bool first = block - pass.begin_block < Config::kWarps;
      storage.mass[warp][lane] = first ? written : storage.mass[warp][lane] + written;
    }
  }

  // Whether the row is to be divided by its sum once the pass is through.
  __device__ __forceinline__ bool normalizes(const Pass& pass) const {
    return params.normalize != 0 && params.h_q - pass.first_head <= Config::kHeads;
  }

  // Zeros past the blocks that can have valid slots.
  __device__ __forceinline__ void clear_rest(const Pass& pass) const {
    for (int32_t block = pass.end_block; block < pass.row_end_block; ++block) {
      if (!owns(block)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t slot = block * Config::kSlots + half * 32 + lane;
        if (slot < params.topk) __stcg(pass.dist + slot, 0.f);
      }
    }
  }

  // Divides the row by its sum. Each thread reads what it wrote itself.
  __device__ __forceinline__ void divide(const Pass& pass) {
    if (warp >= pass.end_block) storage.mass[warp][lane] = 0.f;
    storage.sums_ready.arrive();
    ++round;
    wait();
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < Config::kWarps; ++other) total += storage.mass[other][lane];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
    const float divisor = max_nan(total, kLeastDivisor);
    for (int32_t block = warp; block < pass.row_end_block; block += Config::kWarps) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t slot = block * Config::kSlots + half * 32 + lane;
        if (slot < params.topk) __stcg(pass.dist + slot, __ldcg(pass.dist + slot) / divisor);
      }
    }
  }
};

}  // namespace cupymla::attn_dist
