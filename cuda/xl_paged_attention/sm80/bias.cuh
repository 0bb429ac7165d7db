// The bias of scores, in the query's dtype or fp32, by position or by distance from the newest key.
#pragma once

#include "../../common/math.cuh"
#include "../../common/memory.cuh"
#include "schedule.cuh"

namespace cupymla::xl_paged_attention {

template <typename Element>
__device__ __forceinline__ float to_float(Element value) {
  return static_cast<float>(value);
}

// The bias of one query head of one sequence.
template <typename Query>
struct BiasRow {
  const uint8_t* entries = nullptr;
  float slope = 0.0f;

  __device__ __forceinline__ BiasRow(const Parameters& params, int32_t seq, int32_t head) {
    if (params.bias_form == kAlibi) {
      slope = params.slopes[head * params.slopes_head];
    } else if (params.bias_form != kNoBias) {
      entries = params.bias + (seq * params.bias_seq + head * params.bias_head) *
                                  (params.bias_wide != 0 ? 4 : static_cast<int>(sizeof(Query)));
    }
  }

  __device__ __forceinline__ float entry(const Parameters& params, int32_t index) const {
    if (params.bias_wide != 0) return __ldg(reinterpret_cast<const float*>(entries) + index);
    return to_float(__ldg(reinterpret_cast<const Query*>(entries) + index));
  }

  // Brings the entry of a key into L2, if the key has one of its own.
  __device__ __forceinline__ void prefetch(const Parameters& params, int32_t position, int32_t count) const {
    const bool is_dense = params.bias_form == kDenseBias;
    const int32_t index = is_dense ? position : count - 1 - position;
    if (position < count && (is_dense || index < params.extent)) {
      const int bytes = params.bias_wide != 0 ? 4 : static_cast<int>(sizeof(Query));
      prefetch_l2(entries + static_cast<int64_t>(index) * bytes);
    }
  }

  // The bias of the key at `position` < count.
  __device__ __forceinline__ float at(const Parameters& params, int32_t position, int32_t count) const {
    const int32_t distance = count - 1 - position;
    if (params.bias_form == kDenseBias) return entry(params, position);
    if (params.bias_form == kAlibi) return -slope * static_cast<float>(distance);
    if (distance < params.extent) return entry(params, distance);
    return params.clamp != 0 ? entry(params, params.extent - 1) : 0.0f;
  }
};

// The bias of a tile for the two rows and kPairs pairs of neighbouring tokens that a lane holds of it. Entries are kept
// as they come from memory until they are used: widening them would wait for them.
template <typename Query, int kPairs>
struct TileBias {
  uint32_t bits[kPairs][2][2];  // [pair][row][token of the pair]
  bool wide;                    // fp32 bits, else those of one 16-bit element

  __device__ __forceinline__ float value(int pair, int row, int token) const {
    const uint32_t found = bits[pair][row][token];
    if (wide) return __uint_as_float(found);
    const uint16_t narrow = static_cast<uint16_t>(found);
    return to_float(*reinterpret_cast<const Query*>(&narrow));
  }

  // Brings the bias of later tokens into L2: what is loaded must not wait behind the copies that are under way.
  __device__ __forceinline__ void prefetch(const Parameters& params, const BiasRow<Query> (&lines)[2], int32_t rows,
                                           int32_t first, int32_t tile_tokens, int32_t count) const {
    const int32_t position = first + static_cast<int32_t>(threadIdx.x % 4) * (tile_tokens / 4);
    lines[0].prefetch(params, position, count);
    if (rows > 8) lines[1].prefetch(params, position, count);
  }

  // Asks for the bias of tokens first + token_of(pair), + 1 of `tile_tokens` from `first` on. Rows past `rows` get
  // something finite or what another row gets; tokens past `count` get anything. kNext: this holds the bias of an
  // earlier tile of the same segment.
  template <bool kNext, typename TokenOf>
  __device__ __forceinline__ void load(const Parameters& params, const BiasRow<Query> (&lines)[2], int32_t rows,
                                       int32_t first, int32_t tile_tokens, int32_t count, TokenOf token_of) {
    const int32_t farthest = count - 1 - first;
    const bool inside = farthest >= tile_tokens - 1;
    wide = params.bias_wide != 0;
    if (params.bias_form == kAlibi) {
      slope(lines, farthest, token_of);
    } else if (params.bias_form == kDenseBias && inside) {
      fetch<1>(lines, rows, first, token_of);
    } else if (params.bias_form == kRelativeBias && inside && farthest < params.extent) {
      fetch<-1>(lines, rows, farthest, token_of);
    } else if (params.bias_form == kRelativeBias && farthest - (tile_tokens - 1) >= params.extent) {
      // An earlier tile lies past the extent as well and has left the entry here. To load it again, and copy it, would
      // wait for it in every tile.
      if constexpr (!kNext) repeat(params, lines);
    } else {
      fetch_each(params, lines, rows, first, count, token_of);
    }
  }

 private:
  // Entries start + kStep * token, all of which exist.
  template <int kStep, typename TokenOf>
  __device__ __forceinline__ void fetch(const BiasRow<Query> (&lines)[2], int32_t rows, int32_t start,
                                        TokenOf token_of) {
    if (wide) {
      fetch_as<float, kStep>(lines, rows, start, token_of);
    } else {
      fetch_as<uint16_t, kStep>(lines, rows, start, token_of);
    }
  }

  template <typename Entry, int kStep, typename TokenOf>
  __device__ __forceinline__ void fetch_as(const BiasRow<Query> (&lines)[2], int32_t rows, int32_t start,
                                           TokenOf token_of) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (row == 1 && rows <= 8) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) bits[pair][1][0] = bits[pair][1][1] = 0;
        break;
      }
      const Entry* const line = reinterpret_cast<const Entry*>(lines[row].entries) + start + kStep * token_of(0);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          const Entry found = __ldg(line + kStep * (token_of(pair) - token_of(0) + token));
          if constexpr (sizeof(Entry) == 4) {
            bits[pair][row][token] = __float_as_uint(found);
          } else {
            bits[pair][row][token] = found;
          }
        }
      }
    }
  }

  // The whole tile lies past the extent.
  __device__ __forceinline__ void repeat(const Parameters& params, const BiasRow<Query> (&lines)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t same = params.clamp != 0 ? raw(lines[row], params.extent - 1) : 0u;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) bits[pair][row][0] = bits[pair][row][1] = same;
    }
  }

  // Some tokens have no entry, or the last one. All entries are on their way before the first is looked at.
  template <typename TokenOf>
  __device__ __forceinline__ void fetch_each(const Parameters& params, const BiasRow<Query> (&lines)[2], int32_t rows,
                                             int32_t first, int32_t count, TokenOf token_of) {
    const bool is_dense = params.bias_form == kDenseBias;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        const int32_t position = first + token_of(pair) + token;
        const int32_t distance = count - 1 - position;
        const int32_t index = is_dense ? position : min(distance, params.extent - 1);
        const bool has_entry = distance >= 0 && (is_dense || distance < params.extent || params.clamp != 0);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          bits[pair][row][token] = has_entry && (row == 0 || rows > 8) ? raw(lines[row], index) : 0u;
        }
      }
    }
  }

  template <typename TokenOf>
  __device__ __forceinline__ void slope(const BiasRow<Query> (&lines)[2], int32_t farthest, TokenOf token_of) {
    wide = true;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        const float distance = static_cast<float>(farthest - token_of(pair) - token);
#pragma unroll
        for (int row = 0; row < 2; ++row) bits[pair][row][token] = __float_as_uint(-lines[row].slope * distance);
      }
    }
  }

  // An entry as it is stored.
  __device__ __forceinline__ uint32_t raw(const BiasRow<Query>& line, int32_t index) const {
    if (wide) return __ldg(reinterpret_cast<const uint32_t*>(line.entries) + index);
    return __ldg(reinterpret_cast<const uint16_t*>(line.entries) + index);
  }
};

}  // namespace cupymla::xl_paged_attention
