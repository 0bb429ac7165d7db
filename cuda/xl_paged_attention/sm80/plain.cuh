// The plain engine: fp32 arithmetic from global memory, for fp32 queries and for any cache at all.
//
// A warp takes 32 keys at a time: for the scores a lane has one key and all channels, for the values a lane has every
// 32nd channel and goes through the keys. What hides the latency is the number of warps.
#pragma once

#include "../../common/fp8_fp4.cuh"
#include "bias.cuh"
#include "storage.cuh"
#include "weights.cuh"

namespace cupymla::xl_paged_attention {

template <>
__device__ __forceinline__ float to_float<E4m3>(E4m3 value) {
  const uint32_t half = half_bits_of<E4m3>(value.bits);
  return __half2float(reinterpret_cast<const __half*>(&half)[0]);
}

template <>
__device__ __forceinline__ float to_float<E5m2>(E5m2 value) {
  const uint32_t half = half_bits_of<E5m2>(value.bits);
  return __half2float(reinterpret_cast<const __half*>(&half)[0]);
}

template <typename Config>
struct PlainEngine {
  using Query = typename Config::Query;
  using Cache = typename Config::Cache;
  static constexpr int kRows = Config::kRows;

  const Parameters& params;
  Storage<Config>& storage;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  float out[kRows][Config::kLaneChannels];
  float row_max[kRows], row_sum[kRows];  // sums are this lane's part

  __device__ __forceinline__ PlainEngine(const Parameters& params, Storage<Config>& storage,
                                         const Line<Config>&, const SegmentIterator<Config>&)
      : params(params), storage(storage) {}

  __device__ __forceinline__ void ask_query_early(const Segment&) {}

  // Q + u in fp32, rounded to the query's dtype where that is narrower.
  __device__ __forceinline__ void stage_query(const Segment& segment) {
    float* const staged = reinterpret_cast<float*>(storage.query);
    for (int index = threadIdx.x; index < kRows * Config::kHeadSize; index += kThreads) {
      const int row = index / Config::kHeadSize;
      const int channel = index % Config::kHeadSize;
      float value = 0.0f;
      if (row < segment.rows) {
        const int32_t head = segment.first_head + row;
        const uint8_t* line = params.query + segment.seq * params.query_seq_bytes + head * params.query_head_bytes;
        value = to_float(reinterpret_cast<const Query*>(line)[channel]);
        if (params.pos_bias_u != nullptr) {
          const uint8_t* offsets = params.pos_bias_u + head * params.u_head_bytes;
          value += params.u_wide != 0 ? reinterpret_cast<const float*>(offsets)[channel]
                                      : to_float(reinterpret_cast<const Query*>(offsets)[channel]);
          value = to_float(static_cast<Query>(value));
        }
      }
      staged[index] = value;
    }
  }

  __device__ __forceinline__ void multiply_key(float (&scores)[kRows], const uint8_t* key) const {
    const float* const staged = reinterpret_cast<const float*>(storage.query);
    // Sums of eight products, then their sum: a chain of 256 roundings would show.
    static_assert(Config::kHeadSize % 8 == 0 && 8 % Config::kVector == 0);
#pragma unroll 2
    for (int first = 0; first < Config::kHeadSize; first += 8) {
      float sums[kRows] = {};
#pragma unroll
      for (int channel = first; channel < first + 8; channel += Config::kVector) {
        const int32_t chunk = channel / params.chunk;
        const uint8_t* from = key + chunk * params.k_chunk_bytes + (channel - chunk * params.chunk) * Config::kItem;
        const uint2 packed = __ldg(reinterpret_cast<const uint2*>(from));
        const Cache* const elements = reinterpret_cast<const Cache*>(&packed);
#pragma unroll
        for (int i = 0; i < Config::kVector; ++i) {
          const float element = to_float(elements[i]);
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            sums[row] = fmaf(staged[row * Config::kHeadSize + channel + i], element, sums[row]);
          }
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) scores[row] += sums[row];
    }
  }

  __device__ __forceinline__ void multiply_values(const float (&weights)[kRows], int64_t value, uint32_t existing) {
    uint32_t waiting = existing;
    while (waiting != 0) {
      // Several tokens at a time, so that their loads are under way together.
      const int taken = min(Config::kTokensAtOnce, __popc(waiting));
      int token[Config::kTokensAtOnce];
      Cache element[Config::kTokensAtOnce][Config::kLaneChannels];
#pragma unroll
      for (int i = 0; i < Config::kTokensAtOnce; ++i) {
        if (i < taken) {
          token[i] = __ffs(static_cast<int>(waiting)) - 1;
          waiting &= waiting - 1;
          const uint8_t* const from = params.v_cache + __shfl_sync(kFullWarp, value, token[i]);
#pragma unroll
          for (int part = 0; part < Config::kLaneChannels; ++part) {
            const int channel = part * 32 + lane;
            if (Config::kHeadSize % 32 == 0 || channel < Config::kHeadSize) {
              element[i][part] = *reinterpret_cast<const Cache*>(from + channel * params.v_channel_bytes);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Config::kTokensAtOnce; ++i) {
        if (i < taken) {
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            const float weight = __shfl_sync(kFullWarp, weights[row], token[i]);
#pragma unroll
            for (int part = 0; part < Config::kLaneChannels; ++part) {
              if (Config::kHeadSize % 32 == 0 || part * 32 + lane < Config::kHeadSize) {
                out[row][part] = fmaf(weight, to_float(element[i][part]), out[row][part]);
              }
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void work_tile(const Segment& segment, int32_t tile, float score_factor) {
    const int32_t position = tile * Config::kTile + lane;
    const int32_t column = static_cast<uint32_t>(position) / static_cast<uint32_t>(params.block_size);
    const int64_t inside = position - column * params.block_size;
    const int64_t entry =
        position < segment.count ? params.block_tables[segment.seq * params.tables_seq + column] : -1;
    const bool exists = entry >= 0 && entry < params.num_blocks;
    const uint32_t existing = __ballot_sync(kFullWarp, exists);
    const int64_t kv_head = segment.kv_head;
    float scores[kRows] = {};
    if (exists) {
      multiply_key(scores, params.k_cache + entry * params.k_block_bytes + kv_head * params.k_head_bytes +
                               inside * params.k_token_bytes);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float score = negative_infinity(), bias = 0.0f;
      if (exists && row < segment.rows) {
        score = scores[row] * score_factor;
        if (params.bias_form != kNoBias) {
          bias = BiasRow<Query>(params, segment.seq, segment.first_head + row).at(params, position, segment.count);
          score = fmaf(bias, params.bias_log2, score);
        }
      }
      float top = score;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = max_nan(top, __shfl_xor_sync(kFullWarp, top, step));
      top = max_nan(top, row_max[row]);
      const float base = top == negative_infinity() ? 0.0f : top;
      const float factor = power<Query>(row_max[row] - base);
      row_max[row] = top;
      // What the score lost by its rounding would show in a weight; but past this a base lies too far from its score.
      constexpr float kCoarseBase = 0x1p20f;
      const float product_excess = fmaf(scores[row], score_factor, -base);
      const float excess = params.bias_form == kNoBias ? product_excess : fmaf(bias, params.bias_log2, product_excess);
      const bool is_plain = score == negative_infinity() || fabsf(base) > kCoarseBase;
      scores[row] = power<Query>(is_plain ? score - base : excess);
      row_sum[row] = row_sum[row] * factor + scores[row];
#pragma unroll
      for (int part = 0; part < Config::kLaneChannels; ++part) out[row][part] *= factor;
    }
    const int64_t value = entry * params.v_block_bytes + kv_head * params.v_head_bytes + inside * params.v_token_bytes;
    multiply_values(scores, value, existing);
  }

  // Behind a barrier that follows `stage_query`.
  __device__ __forceinline__ void attend(const Segment& segment) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      row_max[row] = negative_infinity();
      row_sum[row] = 0.0f;
#pragma unroll
      for (int part = 0; part < Config::kLaneChannels; ++part) out[row][part] = 0.0f;
    }
    const float k_scale =
        params.k_scales != nullptr ? params.k_scales[segment.kv_head * params.k_scales_head] : params.k_scale;
    for (int32_t tile = segment.first + warp; tile < segment.end; tile += kWarps) {
      work_tile(segment, tile, params.score_log2 * k_scale);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) row_sum[row] += __shfl_xor_sync(kFullWarp, row_sum[row], step);
    }
  }

  __device__ __forceinline__ void store_statistics() {
    if (lane == 0) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        storage.row_max[warp][row] = row_max[row];
        storage.row_sum[warp][row] = row_sum[row];
      }
    }
  }

  template <typename Weight>
  __device__ __forceinline__ void store_columns(float* area, int rows, int first, int columns, Weight weight) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float factor = weight(row);
#pragma unroll
      for (int part = 0; part < Config::kLaneChannels; ++part) {
        const int channel = part * 32 + lane;
        if (row < rows && channel >= first && channel < min(first + columns, Config::kHeadSize)) {
          area[row * columns + channel - first] = out[row][part] * factor;
        }
      }
    }
  }
};

}  // namespace cupymla::xl_paged_attention
