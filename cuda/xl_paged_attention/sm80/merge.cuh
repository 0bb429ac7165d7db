// The end of a segment: the warps' results become one, and where the unit is spread over several CTAs, theirs do.
//
// A CTA that has only a part of a unit leaves it in one of its two buffers of `partials`: buffer 0 if the part is the
// first segment of the CTA, buffer 1 if it is the last (it can be no other). A buffer holds, for each row, head_size
// unnormalised sums, then maximum and sum of the row. The CTA that arrives last puts the parts together in the order
// of the CTAs, so the result does not depend on who that was. What it reads is ordered by the counter: the writes of a
// CTA come before its thread 0's arrival, by the barrier between them, and the last arrival before the reads.
#pragma once

#include "../../common/math.cuh"
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
  static constexpr int kBufferFloats = kRows * (kHeadSize + 2);
  static constexpr int kBatch = Config::kMergeBatch;  // loads that a thread has under way when it puts parts together
  static constexpr int kGroup = 12;  // parts that are put together at once: 144 CTAs take two levels of one batch
  // Where every thread has one vector of a part, more parts at once cost less than another level. A lane for each.
  static constexpr int kMostAtOnce = 3 * kBatch > 32 ? 32 : 3 * kBatch > kGroup ? 3 * kBatch : kGroup;
  static_assert(27 * 27 >= kMaxCtas, "the largest group has a lane for each part");

  const Parameters& params;
  Storage<Config>& storage;
  const Segment& segment;
  const bool is_first;  // segment of this CTA

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

  // Writes four elements of the result. What is rounded to 16 bits takes one division instead of four; `total` is 1 at
  // least, but for rounding.
  __device__ __forceinline__ void store_out(int row, int channel, float4 sum, float total, float v_scale) const {
    struct alignas(4 * sizeof(Query)) Packed {
      Query values[4];
    };
    const float inverse = 1.0f / total;
    const auto rounded = [&](float value) {
      const float mean = sizeof(Query) == 2 ? value * inverse : value / total;
      return static_cast<Query>(total == 0.0f ? 0.0f : mean * v_scale);
    };
    uint8_t* to = params.out + segment.seq * params.out_seq_bytes + (segment.first_head + row) * params.out_head_bytes;
    reinterpret_cast<Packed*>(to)[channel / 4] = {rounded(sum.x), rounded(sum.y), rounded(sum.z), rounded(sum.w)};
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

  __device__ __forceinline__ void store_lse(int row, float top, float total) const {
    if (params.lse != nullptr) {
      params.lse[segment.seq * params.lse_seq + (segment.first_head + row) * params.lse_head] =
          total == 0.0f ? positive_infinity() : log_sum(top, total);
    }
  }

  __device__ __forceinline__ float v_scale() const {
    return params.v_scales != nullptr ? params.v_scales[segment.kv_head * params.v_scales_head] : params.v_scale;
  }

  __device__ __forceinline__ float* buffer(uint32_t cta, bool is_first) const {
    return params.partials + (2 * static_cast<int64_t>(cta) + (is_first ? 0 : 1)) * kBufferFloats;
  }

  // The largest of a row's scores in this CTA.
  __device__ __forceinline__ float top_of(int row) const {
    float top = storage.row_max[0][row];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) top = max_nan(top, storage.row_max[other][row]);
    return top;
  }

  // By a warp, while the others are at work: whose parts are to be put together, and in which groups.
  __device__ __forceinline__ void prepare() const {
    if (segment.whole()) return;
    // Worked out again, or it would be in registers through all tiles.
    const Line<Config> line(params, storage.tiles, storage.even);
    Spread spread;
    spread.first_cta = line.owner(segment.start);
    spread.begins_with_it = line.part(spread.first_cta) == segment.start;
    spread.parts = static_cast<int>(line.owner(segment.start + segment.tiles - 1) - spread.first_cta) + 1;
    spread.group = spread.parts;
    spread.first = 0;
    spread.groups = 1;
    if (spread.parts > (segment.rows * kHeadSize / 4 <= kThreads ? kMostAtOnce : kGroup)) {
      spread.group = kGroup;  // at most 27 for kMaxCtas
      while (spread.group * spread.group < spread.parts) ++spread.group;
      spread.first = static_cast<int>(blockIdx.x - spread.first_cta) / spread.group * spread.group;
      spread.groups = divide_up(spread.parts, spread.group);
    }
    if (threadIdx.x % 32 == 0) storage.spread = spread;
  }

  // All threads. What it leaves in shared memory is written again behind the barrier of the next segment's query.
  template <typename Engine>
  __device__ __forceinline__ void finish(Engine& engine) const {
    engine.store_statistics();
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = segment.rows;
    const bool whole = segment.whole();
    float* const partial = buffer(blockIdx.x, is_first);
    if (warp == kWarps - 1) merge_statistics(whole, partial);
    const float scale = v_scale();
    constexpr int kAllColumns = round_up(kHeadSize, 16);
    const int columns_at_once = kWarps * rows * kAllColumns <= kMergeFloats
                                    ? kAllColumns
                                    : min(kAllColumns, kMergeFloats / (kWarps * rows) / 16 * 16);
    for (int first = 0; first < kHeadSize; first += columns_at_once) {
      const int columns = min(columns_at_once, round_up(kHeadSize - first, 16));
      engine.store_columns(storage.exchange + warp * rows * columns, rows, first, columns, [&](int row) {
        return row < rows ? weight(storage.row_max[warp][row], top_of(row)) : 0.0f;
      });
      __syncthreads();
      for (int row = warp; row < rows; row += kWarps) {
        for (int place = 4 * lane; place < min(columns, kHeadSize - first); place += 128) {
          float4 sum = {};
#pragma unroll
          for (int other = 0; other < kWarps; ++other) {
            const float* const part = storage.exchange + (other * rows + row) * columns + place;
            const float4 found = *reinterpret_cast<const float4*>(part);
            sum.x += found.x;
            sum.y += found.y;
            sum.z += found.z;
            sum.w += found.w;
          }
          if (whole) {
            store_out(row, first + place, sum, storage.merged_sum[row], scale);
          } else {
            // By name, for an assignment becomes four stores.
            __stcg(reinterpret_cast<float4*>(partial + row * kHeadSize + first + place), sum);
          }
        }
      }
      if (first + columns_at_once < kHeadSize) __syncthreads();
    }
    if (!whole) merge(scale);
  }

  // By a warp: maxima and sums of the warps into those of the CTA. A lane for each row and warp: one after another, the
  // last warp would come late to the barrier, with four times the instructions.
  __device__ __forceinline__ void merge_statistics(bool whole, float* partial) const {
    constexpr int kRowsAtOnce = 32 / kWarps;
    const int lane = threadIdx.x % 32, other = lane / kRowsAtOnce;
#pragma unroll 1
    for (int first = 0; first < segment.rows; first += kRowsAtOnce) {
      const int row = first + lane % kRowsAtOnce;
      const bool used = row < segment.rows;
      const float top = used ? top_of(row) : 0.0f;
      float total = used ? storage.row_sum[other][row] * accurate_weight(storage.row_max[other][row], top) : 0.0f;
#pragma unroll
      for (int step = kRowsAtOnce; step < 32; step *= 2) total += __shfl_xor_sync(kFullWarp, total, step);
      if (!used || other != 0) continue;
      storage.merged_sum[row] = total;
      if (whole) {
        store_lse(row, top, total);
      } else {
        reinterpret_cast<float2*>(partial + segment.rows * kHeadSize)[row] = {top, total};
      }
    }
  }

  // What CTAs have left of a unit, those at equal distances. All CTAs but the unit's first begin with it.
  struct Parts {
    float* buffers;  // the first one's CTA's
    int shift;     // floats from there to its part: to buffer 1 if it does not begin with the unit
    int step;      // floats from one CTA's buffers to those of the next

    __device__ __forceinline__ float* operator[](int part) const { return part == 0 ? buffers + shift : later(part); }
    // Any but the first.
    __device__ __forceinline__ float* later(int part) const { return buffers + part * step; }
  };

  // The last CTA to arrive puts the parts together. Many parts are first put together in groups, each by the last of
  // its CTAs, in the buffer of the group's first: what one CTA reads alone, and waits for, stays short. `Units.merging`
  // in plan.py follows this.
  __device__ __forceinline__ void merge(float scale) const {
    const Spread& spread = storage.spread;
    // A CTA is the first of one unit at most, and a later one of one unit at most.
    uint32_t* const unit_counter =
        counter_set(params.arrivals, storage.launch) + 3 * static_cast<int64_t>(spread.first_cta);
    const int first = spread.first, first_shift = spread.begins_with_it ? 0 : kBufferFloats;
    Parts left{buffer(spread.first_cta + first, true), first == 0 ? first_shift : 0, 2 * kBufferFloats};
    uint32_t* counter = first == 0 ? unit_counter + 1 : unit_counter + 3 * static_cast<int64_t>(first) + 2;
    bool is_result = spread.groups == 1;
    int members = min(spread.group, spread.parts - first);
    while (arrive(counter, members)) {
      merge_parts(left, members, is_result, scale);
      if (is_result) break;
      is_result = true;
      members = spread.groups;
      left = {buffer(spread.first_cta, true), first_shift, spread.group * 2 * kBufferFloats};
      counter = unit_counter;
    }
  }

  // Whether this CTA is the last of `parts` to leave its part.
  __device__ __forceinline__ bool arrive(uint32_t* counter, int parts) const {
    __syncthreads();
    if (threadIdx.x == 0) storage.last = arrive_at(counter) == static_cast<uint32_t>(parts - 1);
    __syncthreads();
    return storage.last;
  }

  // Puts parts together into the result, or into the first of them; a warp for a row, which meets no barrier. Lane l
  // knows what part l weighs. Reads past L1, which may hold what another CTA of this SM has read there.
  __device__ __forceinline__ void merge_parts(const Parts& left, int parts, bool is_result, float scale) const {
    constexpr int kVectors = kHeadSize / 4;  // of a row, of four channels each
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < segment.rows; row += kWarps) {
      float2 known = {negative_infinity(), 0.0f};
      if (lane < parts) known = __ldcg(statistics(left[lane]) + row);
      float4 values[kBatch];
      fetch(values, left, 0, parts, row, lane);
      const float top = warp_max(known.x);
      const float factor = accurate_weight(known.x, top);
      const float total = warp_sum(known.y * factor);
#pragma unroll 1
      for (int first = 0; first < kVectors; first += 32) {
        const int vector = first + lane;
        float4 sum = {};
#pragma unroll 1
        for (int done = 0; done < parts; done += kBatch) {
          if (first + done > 0) fetch(values, left, done, parts, row, vector);
          float factors[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) factors[i] = __shfl_sync(kFullWarp, factor, (done + i) % 32);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (done + i < parts) {
              sum.x = fmaf(values[i].x, factors[i], sum.x);
              sum.y = fmaf(values[i].y, factors[i], sum.y);
              sum.z = fmaf(values[i].z, factors[i], sum.z);
              sum.w = fmaf(values[i].w, factors[i], sum.w);
            }
          }
        }
        if (vector >= kVectors) continue;
        if (is_result) {
          store_out(row, 4 * vector, sum, total, scale);
        } else {
          reinterpret_cast<float4*>(left[0])[row * kVectors + vector] = sum;
        }
      }
      if (lane != 0) continue;
      if (is_result) {
        store_lse(row, top, total);
      } else {
        statistics(left[0])[row] = {top, total};
      }
    }
  }

  static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = max_nan(value, __shfl_xor_sync(kFullWarp, value, step));
    return value;
  }

  static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
    return value;
  }

  __device__ __forceinline__ float2* statistics(float* part) const {
    return reinterpret_cast<float2*>(part + segment.rows * kHeadSize);
  }

  // One vector of a row of the parts from `begin` on.
  static __device__ __forceinline__ void fetch(float4 (&values)[kBatch], const Parts& left, int begin, int end, int row,
                                               int vector) {
    if (vector >= kHeadSize / 4) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (begin + i < end) {
        const float* const part = i == 0 ? left[begin] : left.later(begin + i);
        values[i] = __ldcg(reinterpret_cast<const float4*>(part) + row * (kHeadSize / 4) + vector);
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
