// The end of a segment: the warps' results become one, and where the unit is spread over several CTAs, theirs do.
//
// A CTA that has only a part of a unit leaves it in one of its two slots of `partials`: slot 0 if the part is the
// first segment of the CTA, slot 1 if it is the last (it can be no other). A slot holds, for each row, head_size
// unnormalised sums, then maximum and sum of the row. The CTA that arrives last puts the parts together in the order
// of the CTAs, so the result does not depend on who that was. What it reads is ordered by the counter: the writes of a
// CTA come before its thread 0's arrival, by the barrier between them, and the last arrival before the reads.
#pragma once

#include "../../common/accurate_exp2.cuh"
#include "arrivals.cuh"
#include "schedule.cuh"
#include "storage.cuh"
#include "weights.cuh"

namespace cupymla::xl_paged_attention {

template <typename Config>
struct Merge {
  using Query = typename Config::Query;
  static constexpr int kHeadSize = Config::kHeadSize;
  static constexpr int kRows = Config::kRows;
  static constexpr int kSlotFloats = kRows * (kHeadSize + 2);
  static constexpr int kBatch = Config::kMergeBatch;  // loads that a thread has under way when it puts parts together
  static constexpr int kGroup = 12;  // parts that are put together at once: 144 CTAs take two levels of one batch
  // Where every thread has one vector of a part, more parts at once cost less than another level.
  static constexpr int kMostAtOnce = 3 * kBatch > kGroup ? 3 * kBatch : kGroup;
  // Groups of as many parts as there are groups, of all CTAs that a GPU can hold.
  static_assert(kRows * 64 <= kMergeFloats / 2 && kMostAtOnce <= 64, "statistics of the largest group");

  const Parameters& params;
  Storage<Config>& storage;
  const Line<Config::kTile>& line;
  const Segment& segment;
  const int32_t first_head;
  const int32_t rows;

  // exp2(maximum - top) with weight 0 for parts that saw no score above -inf.
  static __device__ __forceinline__ float weight(float maximum, float top) {
    return power<Query>(excess(maximum, top));
  }

  static __device__ __forceinline__ float excess(float maximum, float top) {
    return maximum - (top == negative_infinity() ? 0.0f : top);
  }

  // The same for sums that become lse, which is fp32 for every query.
  static __device__ __forceinline__ float accurate_weight(float maximum, float top) {
    return accurate_exp2(excess(maximum, top));
  }

  // Writes one element of the result.
  __device__ __forceinline__ void store_out(int row, int channel, float sum, float v_scale) const {
    const float total = storage.merged_sum[row];
    const float value = total == 0.0f ? 0.0f : sum / total * v_scale;
    uint8_t* to = params.out + segment.seq * params.out_seq_bytes + (first_head + row) * params.out_head_bytes;
    reinterpret_cast<Query*>(to)[channel] = static_cast<Query>(value);
  }

  // The maximum and the logarithm of the sum, in units of lse, rounded once. In fp32 the logarithm, its product with
  // the unit and the result would each be rounded at the size of the result: a unit in the last place in all, where a
  // reference may be off by half of one. `total` is 1 at least, but for rounding, or NaN; what becomes of its exponent
  // then does not matter.
  __device__ __forceinline__ float log_sum(float top, float total) const {
    const uint32_t exponent = __float_as_uint(total) >> 23;
    const float mantissa = total * __uint_as_float((254u - exponent) << 23);
    const double log2_total = static_cast<int32_t>(exponent) - 127 + static_cast<double>(log2f(mantissa));
    return static_cast<float>(fma(static_cast<double>(top), static_cast<double>(params.max_unit),
                                  log2_total * static_cast<double>(params.lse_unit)));
  }

  __device__ __forceinline__ void store_lse() const {
    const int row = threadIdx.x;
    if (params.lse != nullptr && row < rows) {
      const float total = storage.merged_sum[row];
      params.lse[segment.seq * params.lse_seq + (first_head + row) * params.lse_head] =
          total == 0.0f ? positive_infinity() : log_sum(storage.merged_max[row], total);
    }
  }

  __device__ __forceinline__ float v_scale() const {
    const int32_t kv_head = segment.unit / params.row_blocks;
    return params.v_scales != nullptr ? params.v_scales[kv_head * params.v_scales_head] : params.v_scale;
  }

  __device__ __forceinline__ float* slot(uint32_t cta, bool is_first) const {
    return params.partials + (2 * static_cast<int64_t>(cta) + (is_first ? 0 : 1)) * kSlotFloats;
  }

  // All threads. Ends with a barrier, after which the shared memory in use here and `query` are free.
  template <typename Engine>
  __device__ __forceinline__ void finish(Engine& engine) {
    engine.store_statistics();
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < rows) {
      const int row = threadIdx.x;
      float top = storage.row_max[0][row];
      for (int other = 1; other < kWarps; ++other) top = max_nan(top, storage.row_max[other][row]);
      float total = 0.0f;
      for (int other = 0; other < kWarps; ++other) {
        total += storage.row_sum[other][row] * accurate_weight(storage.row_max[other][row], top);
      }
      storage.merged_max[row] = top;
      storage.merged_sum[row] = total;
    }
    __syncthreads();
    const bool whole = segment.whole();
    // The first segment of this CTA's part is the one that the part begins in.
    float* const partial = slot(blockIdx.x, line.part(blockIdx.x) == segment.start + segment.first);
    if (whole) store_lse();
    const float scale = v_scale();
    const int columns_at_once = min(round_up(kHeadSize, 16), kMergeFloats / (kWarps * rows) / 16 * 16);
    for (int first = 0; first < kHeadSize; first += columns_at_once) {
      const int columns = min(columns_at_once, round_up(kHeadSize - first, 16));
      engine.store_columns(storage.exchange + warp * rows * columns, rows, first, columns, [&](int row) {
        return row < rows ? weight(storage.row_max[warp][row], storage.merged_max[row]) : 0.0f;
      });
      __syncthreads();
      for (int index = threadIdx.x; index < rows * columns; index += kThreads) {
        const int row = index / columns;
        const int channel = first + index % columns;
        if (channel >= kHeadSize) continue;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum += storage.exchange[other * rows * columns + index];
        if (whole) {
          store_out(row, channel, sum, scale);
        } else {
          partial[row * kHeadSize + channel] = sum;
        }
      }
      __syncthreads();
    }
    if (whole) return;
    if (threadIdx.x < rows) {
      partial[rows * kHeadSize + 2 * threadIdx.x] = storage.merged_max[threadIdx.x];
      partial[rows * kHeadSize + 2 * threadIdx.x + 1] = storage.merged_sum[threadIdx.x];
    }
    const uint32_t first_cta = line.owner(segment.start);
    const int parts = static_cast<int>(line.owner(segment.start + segment.tiles - 1) - first_cta) + 1;
    merge(first_cta, parts, scale);
    __syncthreads();
  }

  // What the CTAs of a unit have left of it: every `stride`-th from `offset` on. All but the first begin with it.
  struct Parts {
    float* first;
    float* second;
    int offset, stride;

    __device__ __forceinline__ float* operator[](int part) const {
      const int place = offset + part * stride;
      return place == 0 ? first : second + static_cast<int64_t>(place - 1) * (2 * kSlotFloats);
    }
  };

  // The last CTA to arrive puts the parts together. Many parts are first put together in groups, each by the last of
  // its CTAs, in the slot of the group's first: what one CTA reads alone, and waits for, stays short. `Units.merging`
  // in plan.py follows this.
  __device__ __forceinline__ void merge(uint32_t first_cta, int parts, float scale) {
    Parts left{slot(first_cta, line.part(first_cta) == segment.start), slot(first_cta + 1, true), 0, 1};
    // A CTA is the first of one unit at most, and a later one of one unit at most.
    uint32_t* const unit_counter = counter_set(params.arrivals, storage.turn) + 3 * static_cast<int64_t>(first_cta);
    int group = kGroup;  // at most 27 for kMaxCtas
    while (group * group < parts) ++group;
    const bool at_once = parts <= (rows * kHeadSize / 4 <= kThreads ? kMostAtOnce : kGroup);
    const int first = at_once ? 0 : static_cast<int>(blockIdx.x - first_cta) / group * group;
    uint32_t* counter = first == 0 ? unit_counter + 1 : unit_counter + 3 * static_cast<int64_t>(first) + 2;
    bool is_result = at_once;
    int members = at_once ? parts : min(group, parts - first);
    left.offset = first;
    while (arrive(counter, members)) {
      merge_parts(left, members, is_result, scale);
      if (is_result) break;
      is_result = true;
      members = divide_up(parts, group);
      left.offset = 0;
      left.stride = group;
      counter = unit_counter;
    }
  }

  // Whether this CTA is the last of `parts` to leave its part.
  __device__ __forceinline__ bool arrive(uint32_t* counter, int parts) {
    __syncthreads();
    if (threadIdx.x == 0) storage.last = arrive_at(counter) == static_cast<uint32_t>(parts - 1);
    __syncthreads();
    return storage.last;
  }

  // Puts parts together into the result, or into the first of them. Reads past L1, which may hold what another CTA of
  // this SM has read there.
  __device__ __forceinline__ void merge_parts(const Parts& left, int parts, bool is_result, float scale) {
    const int vectors = rows * kHeadSize / 4;  // of four channels
    float4 values[kBatch];
    int index = threadIdx.x;
    if (index < vectors) fetch(values, left, 0, parts, index);
    for (int place = threadIdx.x; place < parts * rows; place += kThreads) {
      const float* statistics = left[place / rows] + rows * kHeadSize + 2 * (place % rows);
      const float2 found = __ldcg(reinterpret_cast<const float2*>(statistics));
      storage.exchange[place] = found.x;
      storage.exchange[kMergeFloats / 2 + place] = found.y;
    }
    __syncthreads();
    merge_statistics(parts);
    __syncthreads();
    if (is_result) store_lse();
#pragma unroll 1
    for (; index < vectors; index += kThreads) {
      if (index >= kThreads) fetch(values, left, 0, parts, index);
      const int row = index * 4 / kHeadSize;
      const float4 sum = sum_parts(values, left, parts, index, row);
      if (is_result) {
        const int channel = index * 4 % kHeadSize;
        store_out(row, channel, sum.x, scale);
        store_out(row, channel + 1, sum.y, scale);
        store_out(row, channel + 2, sum.z, scale);
        store_out(row, channel + 3, sum.w, scale);
      } else {
        reinterpret_cast<float4*>(left[0])[index] = sum;
      }
    }
    if (!is_result && threadIdx.x < rows) {
      float* const statistics = left[0] + rows * kHeadSize + 2 * threadIdx.x;
      statistics[0] = storage.merged_max[threadIdx.x];
      statistics[1] = storage.merged_sum[threadIdx.x];
    }
  }

  static __device__ __forceinline__ void fetch(float4 (&values)[kBatch], const Parts& left, int begin, int end,
                                               int index) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i < end) values[i] = __ldcg(reinterpret_cast<const float4*>(left[begin + i]) + index);
    }
  }

  // The sum of one vector over all parts, of which `values` holds the first.
  __device__ __forceinline__ float4 sum_parts(float4 (&values)[kBatch], const Parts& left, int parts, int index,
                                              int row) const {
    float4 sum = {};
#pragma unroll 1
    for (int done = 0; done < parts; done += kBatch) {
      if (done > 0) fetch(values, left, done, parts, index);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (done + i < parts) {
          const float factor = weight(storage.exchange[(done + i) * rows + row], storage.merged_max[row]);
          sum.x = fmaf(values[i].x, factor, sum.x);
          sum.y = fmaf(values[i].y, factor, sum.y);
          sum.z = fmaf(values[i].z, factor, sum.z);
          sum.w = fmaf(values[i].w, factor, sum.w);
        }
      }
    }
    return sum;
  }

  // Maximum and sum of each row over the parts whose statistics are in shared memory; a warp for a row.
  __device__ __forceinline__ void merge_statistics(int parts) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
      float top = negative_infinity();
      for (int part = lane; part < parts; part += 32) top = max_nan(top, storage.exchange[part * rows + row]);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = max_nan(top, __shfl_xor_sync(kFullWarp, top, step));
      float total = 0.0f;
      for (int part = lane; part < parts; part += 32) {
        const int place = part * rows + row;
        total += storage.exchange[kMergeFloats / 2 + place] * accurate_weight(storage.exchange[place], top);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullWarp, total, step);
      if (lane == 0) {
        storage.merged_max[row] = top;
        storage.merged_sum[row] = total;
      }
    }
  }
};

// Rows of sequences without a key, which lie nowhere on the line.
template <typename Config>
__device__ __forceinline__ void clear_empty(const Parameters& params) {
  using Query = typename Config::Query;
  const int32_t heads = params.num_kv_heads * params.group;
  for (int32_t seq = blockIdx.x; seq < params.num_seqs; seq += gridDim.x) {
    if (key_count(params, seq) > 0) continue;
    for (int32_t index = threadIdx.x; index < heads * Config::kHeadSize; index += kThreads) {
      uint8_t* row = params.out + seq * params.out_seq_bytes + index / Config::kHeadSize * params.out_head_bytes;
      reinterpret_cast<Query*>(row)[index % Config::kHeadSize] = static_cast<Query>(0.0f);
    }
    for (int32_t head = threadIdx.x; params.lse != nullptr && head < heads; head += kThreads) {
      params.lse[seq * params.lse_seq + head * params.lse_head] = positive_infinity();
    }
  }
}

}  // namespace cupymla::xl_paged_attention
