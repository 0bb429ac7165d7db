// The tensor-core engine: one warp's running softmax over its tiles of a segment.
//
// Rows of the products are the query heads of the unit (16, of which `rows` are used), so keys and values are read once
// for all of them. S = Q K^T takes the keys as they lie; the accumulators of S are, as P, the left operand of O += P V
// without leaving their lanes. Within a step of 16 along K or V the order of channels or tokens is free as long as both
// operands keep it; for fp8, whose matrices hold 16 elements in a row, lane l takes channels (tokens) 4 (l % 4) .. + 3
// of each step, so Q is stored in that order and the keys' columns are read in the order that P then has.
#pragma once

#include "../../common/matrix.cuh"
#include "../../common/fp8_fp4.cuh"
#include "../../common/warp_mma.cuh"
#include "bias.cuh"
#include "copies.cuh"

namespace cupymla::xl_paged_attention {

template <typename Config>
struct TensorEngine {
  using Query = typename Config::Query;
  using Cache = typename Config::Cache;
  using Operand = typename Config::Operand;
  using Bias = TileBias<Query, 2 * Config::kSubs>;
  static constexpr int kSubs = Config::kSubs;
  static constexpr int kQuerySteps = Config::kQueryInRegisters ? Config::kChannelSteps : 1;

  const Parameters& params;
  Storage<Config>& storage;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  Feeder<Config> feeder;
  int stage = 0;  // next to work on

  static constexpr int kQueryVectors = Config::kPadded / 8;  // of a row, of eight channels each
  static constexpr int kAsked = divide_up(Config::kRows * kQueryVectors, kThreads);
  uint4 asked_query[kAsked];  // this thread's vectors of the next segment's Q

  uint32_t query[kQuerySteps][4];
  float out[Config::kColumnTiles][4];
  float row_max[2], row_sum[2];  // rows lane / 4 and lane / 4 + 8; sums are this lane's part
  float score_scale;             // what scores are multiplied with, but for the scale of the query's row

  __device__ __forceinline__ TensorEngine(const Parameters& params, Storage<Config>& storage,
                                          const Line<Config>& line, const SegmentIterator<Config>& start)
      : params(params), storage(storage), feeder(params, line, start, smem_address(storage.ring[warp])) {
    // While the first table entries are on their way, and in front of the copies, which it would wait behind.
    if constexpr (Config::kAskEarly) {
      ask_query(start.segment);
      if (feeder.more) feeder.begin_segment();
    }
    if constexpr (Config::kPages) clear_padding();
    for (int filled = 0; filled < Config::kStages - 1; ++filled) feeder.feed(filled);
  }

  // Clears what no copy writes: channels past the head, up to whole matrices of values. Their products are not used.
  __device__ __forceinline__ void clear_padding() {
    constexpr int kHeadBytes = Config::kHeadSize * Config::kSub * Config::kItem;
    constexpr int kPaddingBytes = Config::kValueSubBytes - kHeadBytes;
#pragma unroll
    for (int part = 0; part < Config::kStages * kSubs; ++part) {
      const int first = Config::kKeyBytes + part % kSubs * Config::kValueSubBytes + kHeadBytes;
      for (int byte = lane * 16; byte < kPaddingBytes; byte += 32 * 16) {
        *reinterpret_cast<uint4*>(storage.ring[warp][part / kSubs] + first + byte) = uint4{};
      }
    }
  }

  // Q ---------------------------------------------------------------------------------------------------------------

  // Ahead of `stage_query`, where registers allow it.
  __device__ __forceinline__ void ask_query_early(const Segment& segment) {
    if constexpr (Config::kAskEarly) ask_query(segment);
  }

  // Asks for this thread's vectors of Q.
  __device__ __forceinline__ void ask_query(const Segment& segment) {
#pragma unroll
    for (int part = 0; part < kAsked; ++part) {
      const int index = threadIdx.x + part * kThreads;
      const int row = index / kQueryVectors;
      const int channel = index % kQueryVectors * 8;
      asked_query[part] = uint4{};
      if (row < segment.rows && channel < Config::kHeadSize) {
        const int32_t head = segment.first_head + row;
        const uint8_t* from = params.query + segment.seq * params.query_seq_bytes + head * params.query_head_bytes +
                              channel * 2;
        asked_query[part] = __ldg(reinterpret_cast<const uint4*>(from));
      }
    }
  }

  // Writes Q + u, rounded once, to shared memory; rows past `rows` and channels past the head are zero. Behind an
  // `ask_query_early` of the same segment.
  __device__ __forceinline__ void stage_query(const Segment& segment) {
    if constexpr (!Config::kAskEarly) ask_query(segment);
#pragma unroll
    for (int part = 0; part < kAsked; ++part) {
      const int index = threadIdx.x + part * kThreads;
      const int row = index / kQueryVectors;
      const int channel = index % kQueryVectors * 8;
      uint4 packed = asked_query[part];
      if (params.pos_bias_u != nullptr && row < segment.rows && channel < Config::kHeadSize) {
        const uint8_t* const offsets = params.pos_bias_u + (segment.first_head + row) * params.u_head_bytes;
        add_offset(packed, offsets, channel);
      }
      if (row < Config::kRows) store_query(row, channel, packed);
    }
  }

  __device__ __forceinline__ void add_offset(uint4& packed, const uint8_t* offsets, int channel) const {
    float added[8];
    if (params.u_wide != 0) {
      const float4* const from = reinterpret_cast<const float4*>(offsets) + channel / 4;
      *reinterpret_cast<float4*>(added) = __ldg(from);
      *reinterpret_cast<float4*>(added + 4) = __ldg(from + 1);
    } else {
      const uint4 found = __ldg(reinterpret_cast<const uint4*>(offsets) + channel / 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) added[i] = to_float(reinterpret_cast<const Query*>(&found)[i]);
    }
    Query values[8];
    *reinterpret_cast<uint4*>(values) = packed;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = static_cast<Query>(to_float(values[i]) + added[i]);
    packed = *reinterpret_cast<const uint4*>(values);
  }

  // For fp8, channel 4 c + i of a step goes to place 2 c + i, or 8 + 2 c + i - 2 for the upper two.
  __device__ __forceinline__ void store_query(int row, int channel, uint4 packed) {
    uint8_t* line = storage.query + row * Config::kQueryPitch;
    if constexpr (Config::kFp8) {
      const int step = channel / 16 * 32;
      const int quads = channel % 16 / 4;
      *reinterpret_cast<uint32_t*>(line + step + quads * 4) = packed.x;
      *reinterpret_cast<uint32_t*>(line + step + quads * 4 + 16) = packed.y;
      *reinterpret_cast<uint32_t*>(line + step + quads * 4 + 4) = packed.z;
      *reinterpret_cast<uint32_t*>(line + step + quads * 4 + 20) = packed.w;
    } else {
      *reinterpret_cast<uint4*>(line + channel * 2) = packed;
    }
  }

  // Turns Q in shared memory from bf16 into fp16, each row times the power of two that brings its largest element just
  // below 2^15. What fp16 then rounds off is below 2^-39 of the largest element, less than fp32 sums keep.
  __device__ __forceinline__ void scale_query() {
    for (int row = warp; row < Config::kRows; row += kWarps) {
      uint32_t* const line = reinterpret_cast<uint32_t*>(storage.query + row * Config::kQueryPitch);
      float largest = 0.0f;
      for (int pair = lane; pair < Config::kPadded / 2; pair += 32) {
        const float2 values = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(line + pair));
        largest = max_nan(largest, max_nan(fabsf(values.x), fabsf(values.y)));
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) largest = max_nan(largest, __shfl_xor_sync(kFullWarp, largest, step));
      // Rows of zeros, and rows that hold an infinity or a NaN, stay as they are. Exponents are held to what a normal
      // fp32 number and its inverse can have.
      const bool usable = largest > 0.0f && largest < positive_infinity();
      const int exponent = usable ? max(-110, min(110, 14 - ilogbf(largest))) : 0;
      const float factor = __int_as_float((127 + exponent) << 23);
      for (int pair = lane; pair < Config::kPadded / 2; pair += 32) {
        const float2 values = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(line + pair));
        line[pair] = pack_pair<__half>(values.x * factor, values.y * factor);
      }
      if (lane == 0) storage.query_scale[row] = __int_as_float((127 - exponent) << 23);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_query(uint32_t (&fragment)[4], int step) const {
    const uint32_t base = smem_address(storage.query);
    load_matrix_x4(fragment, base + (lane % 16) * Config::kQueryPitch + step * 32 + lane / 16 * 16);
  }

  __device__ __forceinline__ void begin() {
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < Config::kChannelSteps; ++step) load_query(query[step], step);
    }
#pragma unroll
    for (int column = 0; column < Config::kColumnTiles; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[column][i] = 0.0f;
    }
    row_max[0] = row_max[1] = negative_infinity();
    row_sum[0] = row_sum[1] = 0.0f;
  }

  // Tokens and bias -------------------------------------------------------------------------------------------------

  // The token of a sub-tile that column `e` (0, 1) of this lane in column tile `half` of S stands for.
  __device__ __forceinline__ int token_of(int half, int e) const {
    const int quad = lane % 4;
    return Config::kFp8 && Config::kPages ? 4 * quad + 2 * half + e : 8 * half + 2 * quad + e;
  }

  // Asks for the bias of a tile, one step before it is used, and brings that of a later one nearer.
  template <bool kNext>
  __device__ __forceinline__ void load_bias(Bias& next_bias, const BiasRow<Query> (&lines)[2], int32_t rows,
                                            int32_t tile, int32_t count) const {
    const auto token = [this](int pair) { return pair / 2 * Config::kSub + token_of(pair % 2, 0); };
    next_bias.template load<kNext>(params, lines, rows, tile * Config::kTile, Config::kTile, count, token);
    constexpr int kAhead = 2 * kWarps;  // tiles
    if (params.bias != nullptr) {
      next_bias.prefetch(params, lines, rows, (tile + kAhead) * Config::kTile, Config::kTile, count);
    }
  }

  // Clears the values of tokens that do not exist, which in a page may be NaN: their weights are zero.
  __device__ __forceinline__ void clear_values(uint32_t existing) {
    constexpr int kChunks = Config::kSub * Config::kItem / 16;  // of a channel's 16 tokens
    uint8_t* const values = storage.ring[warp][stage] + Config::kKeyBytes;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
      for (int index = lane; index < Config::kHeadSize * kChunks; index += 32) {
        // The chunks of 16-bit values change places: see copy_pages.
        const int chunk = kChunks == 1 ? 0 : index % kChunks ^ ((index >> 3) & 1);
        const uint32_t kept = existing >> (sub * Config::kSub + chunk * Config::kChunk);
        uint4* const tokens = reinterpret_cast<uint4*>(values + sub * Config::kValueSubBytes) + index;
        uint4 found = *tokens;
        found.x &= mask_of(kept);
        found.y &= mask_of(kept >> (Config::kChunk / 4));
        found.z &= mask_of(kept >> (Config::kChunk / 2));
        found.w &= mask_of(kept >> (3 * Config::kChunk / 4));
        *tokens = found;
      }
    }
    __syncwarp();
  }

  // All bits of the elements of a word whose own bit, from bit 0 on, is set.
  static __device__ __forceinline__ uint32_t mask_of(uint32_t kept) {
    if constexpr (Config::kFp8) return ((kept & 15u) * 0x00204081u & 0x01010101u) * 0xffu;
    return ((kept & 1u) | (kept & 2u) << 15) * 0xffffu;
  }

  // Products --------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_keys(float (&scores)[kSubs][2][4], uint32_t keys) {
    const int matrix = lane / 8;
    const int row = lane % 8;
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[sub][0][i] = scores[sub][1][i] = 0.0f;
    }
    constexpr int kStepsPerLoad = Config::kFp8 ? 2 : 1;
#pragma unroll
    for (int step = 0; step < Config::kChannelSteps; step += kStepsPerLoad) {
      uint32_t q[kStepsPerLoad][4];
#pragma unroll
      for (int part = 0; part < kStepsPerLoad; ++part) {
        if constexpr (Config::kQueryInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) q[part][i] = query[min(step + part, kQuerySteps - 1)][i];
        } else {
          load_query(q[part], min(step + part, Config::kChannelSteps - 1));
        }
      }
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        // Matrices 0, 1 belong to column tile 0 of S, matrices 2, 3 to column tile 1; the odd ones are the second half
        // of a step for 16-bit keys, a second step for fp8.
        const int half = matrix / 2;
        const int chunk = (Config::kFp8 ? step : 2 * step) + matrix % 2;
        uint32_t b[4];
        if constexpr (Config::kPages) {
          const int token = Config::kFp8 ? 4 * (row / 2) + row % 2 + 2 * half : 8 * half + row;
          const int place = Config::kFp8 ? token ^ ((token >> 2) & 2) : token;
          load_matrix_x4(b, keys + (chunk * Config::kTile + sub * Config::kSub + place) * 16);
        } else {
          // The last step of an odd number has no second one; its matrices are read again and not used.
          constexpr bool kOdd = Config::kFp8 && Config::kChannelSteps % 2 != 0;
          const int held = kOdd ? min(chunk, Config::kPaddedChunks - 1) : chunk;
          load_matrix_x4(b, keys + (sub * Config::kSub + 8 * half + row) * Config::kPitch + held * 16);
        }
        if constexpr (Config::kFp8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (step + i % 2 < Config::kChannelSteps) {
              mma_16x8x16<Operand>(scores[sub][i / 2], q[i % 2], half_bits_of<Cache>(b[i]),
                                   half_bits_of<Cache>(b[i] >> 16));
            }
          }
        } else {
          mma_16x8x16<Operand>(scores[sub][0], q[0], b[0], b[1]);
          mma_16x8x16<Operand>(scores[sub][1], q[0], b[2], b[3]);
        }
      }
    }
  }

  // O += P V for one sub-tile.
  __device__ __forceinline__ void multiply_values(const float (&p)[2][4], uint32_t values, int sub) {
    const uint32_t a[4] = {pack_pair<Operand>(p[0][0], p[0][1]), pack_pair<Operand>(p[0][2], p[0][3]),
                           pack_pair<Operand>(p[1][0], p[1][1]), pack_pair<Operand>(p[1][2], p[1][3])};
    const int matrix = lane / 8;
    const int row = lane % 8;
    if constexpr (Config::kPages && !Config::kFp8) {
      const uint32_t base = values + sub * Config::kValueSubBytes;
#pragma unroll
      for (int column = 0; column < Config::kColumnTiles; column += 2) {
        const int channel = column * 8 + matrix / 2 * 8 + row;
        uint32_t b[4];
        load_matrix_x4(b, base + channel * 32 + ((matrix % 2) ^ ((channel >> 2) & 1)) * 16);
        mma_16x8x16<Operand>(out[column], a, b[0], b[1]);
        if (column + 1 < Config::kColumnTiles) mma_16x8x16<Operand>(out[column + 1], a, b[2], b[3]);
      }
    } else if constexpr (Config::kPages) {
      const uint32_t base = values + sub * Config::kValueSubBytes;
#pragma unroll
      for (int column = 0; column < Config::kColumnTiles; column += 4) {
        uint32_t b[4];
        load_matrix_x4(b, base + (column * 8 + lane) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (column + i < Config::kColumnTiles) {
            mma_16x8x16<Operand>(out[column + i], a, half_bits_of<Cache>(b[i]), half_bits_of<Cache>(b[i] >> 16));
          }
        }
      }
    } else {
      const uint32_t base = values + (sub * Config::kSub + matrix % 2 * 8 + row) * Config::kPitch;
#pragma unroll
      for (int column = 0; column < Config::kColumnTiles; column += Config::kFp8 ? 4 : 2) {
        // Of 16-bit values two column tiles, of fp8 values two pairs of them: even channels, then odd ones.
        constexpr int kChunks = Config::kPaddedChunks;
        const int chunk = (Config::kFp8 ? column / 2 : column) + matrix / 2;
        uint32_t b[4];
        load_matrix_x4_transposed(b, base + min(chunk, kChunks - 1) * 16);
        if constexpr (Config::kFp8) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            if (column + 2 * pair < Config::kColumnTiles) {
              const uint32_t low = __byte_perm(b[2 * pair], 0u, 0x3120);
              const uint32_t high = __byte_perm(b[2 * pair + 1], 0u, 0x3120);
              mma_16x8x16<Operand>(out[column + 2 * pair], a, half_bits_of<Cache>(low), half_bits_of<Cache>(high));
              mma_16x8x16<Operand>(out[column + 2 * pair + 1], a, half_bits_of<Cache>(low >> 16),
                                   half_bits_of<Cache>(high >> 16));
            }
          }
        } else {
          mma_16x8x16<Operand>(out[column], a, b[0], b[1]);
          if (column + 1 < Config::kColumnTiles) mma_16x8x16<Operand>(out[column + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Softmax ---------------------------------------------------------------------------------------------------------

  // Raises this row's maximum to that of the new scores and returns the factor for what was summed below the old one.
  __device__ __forceinline__ float raise(int row, float found) {
    const float top = max_nan(row_max[row], quad_max(found));
    // All scores so far are -inf: their weights are zero, as exp2(-inf - 0).
    const float factor = exp2_approx(row_max[row] - (top == negative_infinity() ? 0.0f : top));
    row_max[row] = top;
    return factor;
  }

  __device__ __forceinline__ void add_bias(float (&scores)[kSubs][2][4], const Bias& tile_bias) const {
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[sub][half][i] =
              fmaf(tile_bias.value(2 * sub + half, i / 2, i % 2), params.bias_log2, scores[sub][half][i]);
        }
      }
    }
  }

  // Scores of tokens that do not exist become -inf.
  __device__ __forceinline__ void hide(float (&scores)[kSubs][2][4], uint32_t existing) const {
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool exists = ((existing >> (sub * Config::kSub + token_of(half, i % 2))) & 1u) != 0;
          if (!exists) scores[sub][half][i] = negative_infinity();
        }
      }
    }
  }

  // What the scores of row lane / 4 + 8 * `half` are multiplied with. Read for every tile, as registers are short where
  // heads are large.
  __device__ __forceinline__ float score_factor(int half) const {
    if constexpr (!Config::kScaledQuery) return score_scale;
    return score_scale * storage.query_scale[lane / 4 + 8 * half];
  }

  // `next_bias` is that of this tile and becomes that of the warp's next one.
  __device__ __forceinline__ void work_tile(Bias& next_bias, const BiasRow<Query> (&bias)[2], int32_t rows,
                                            int32_t tile, const Segment& segment) {
    const uint32_t existing = __shfl_sync(kFullWarp, feeder.existing_of, stage);
    const uint32_t keys = smem_address(storage.ring[warp][stage]);
    const Bias tile_bias = next_bias;
    if (params.bias_form != kNoBias && tile + kWarps < segment.end) {
      load_bias<true>(next_bias, bias, rows, tile + kWarps, segment.count);
    }
    stream_copy_wait<Config::kStages - 2>();
    // Every lane's copies are in, and the stage that was read last is free.
    __syncwarp();
    feeder.feed(stage == 0 ? Config::kStages - 1 : stage - 1);

    float scores[kSubs][2][4];
    const float factors[2] = {score_factor(0), score_factor(1)};
    multiply_keys(scores, keys);
    constexpr uint32_t kWholeTile = kFullWarp >> (32 - Config::kTile);
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[sub][half][i] *= factors[i / 2];
      }
    }
    if (params.bias_form != kNoBias) add_bias(scores, tile_bias);
    if (existing != kWholeTile) {
      hide(scores, existing);
      if constexpr (Config::kPages) clear_values(existing);
    }
    float found[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) found[i / 2] = max_nan(found[i / 2], scores[sub][half][i]);
      }
    }
    const float old_max[2] = {row_max[0], row_max[1]};
    const float factor[2] = {raise(0, found[0]), raise(1, found[1])};
    // Where all scores so far are -inf, sums are still zero: so in a warp's first tile, often its only one.
    const auto stays = [&](int row) { return old_max[row] == row_max[row] || old_max[row] == negative_infinity(); };
    if (__any_sync(kFullWarp, !(stays(0) && stays(1)))) {
#pragma unroll
      for (int column = 0; column < Config::kColumnTiles; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[column][i] *= factor[i / 2];
      }
      row_sum[0] *= factor[0];
      row_sum[1] *= factor[1];
    }
    const float base[2] = {row_max[0] == negative_infinity() ? 0.0f : row_max[0],
                           row_max[1] == negative_infinity() ? 0.0f : row_max[1]};
#pragma unroll
    for (int sub = 0; sub < kSubs; ++sub) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = exp2_approx(scores[sub][half][i] - base[i / 2]);
          row_sum[i / 2] += weight;
          scores[sub][half][i] = weight * Config::kWeightScale;
        }
      }
      multiply_values(scores[sub], keys + Config::kKeyBytes, sub);
    }
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // Behind a barrier that follows `stage_query`.
  __device__ __forceinline__ void attend(const Segment& segment) {
    const int32_t rows = segment.rows, last = segment.first_head + rows - 1;
    const BiasRow<Query> bias[2] = {BiasRow<Query>(params, segment.seq, min(segment.first_head + lane / 4, last)),
                                    BiasRow<Query>(params, segment.seq, min(segment.first_head + lane / 4 + 8, last))};
    int32_t tile = segment.first + warp;
    Bias next_bias;
    if (params.bias_form != kNoBias && tile < segment.end) load_bias<false>(next_bias, bias, rows, tile, segment.count);
    if constexpr (Config::kScaledQuery) scale_query();
    begin();
    const float k_scale =
        params.k_scales != nullptr ? params.k_scales[segment.kv_head * params.k_scales_head] : params.k_scale;
    score_scale = params.score_log2 * k_scale;
    for (; tile < segment.end; tile += kWarps) work_tile(next_bias, bias, rows, tile, segment);
#pragma unroll
    for (int row = 0; row < 2; ++row) row_sum[row] = quad_sum(row_sum[row]);
  }

  // Results: what `finish` asks of an engine ------------------------------------------------------------------------

  __device__ __forceinline__ void store_statistics() {
    if (lane % 4 == 0) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        storage.row_max[warp][lane / 4 + 8 * row] = row_max[row];
        storage.row_sum[warp][lane / 4 + 8 * row] = row_sum[row];
      }
    }
  }

  // Writes channels [first, first + columns) of rows below `rows`, each row times weight(row), to [row][column].
  // `first` and `columns` are multiples of 16.
  template <typename Weight>
  __device__ __forceinline__ void store_columns(float* area, int rows, int first, int columns, Weight weight) const {
    constexpr float kUnscale = 1.0f / Config::kWeightScale;
    const int row = lane / 4;
    const float factor = weight(row) * kUnscale;
    float* const to = area + row * columns + 2 * kInterleaved * (lane % 4) - first;
    if (rows <= 8 && columns >= Config::kHeadSize) {
      // All at once. Instructions that are met for the first time cost some seven cycles each, and this is a third of
      // those below.
      if (row >= rows) return;
#pragma unroll
      for (int column = 0; column < Config::kColumnTiles; column += kInterleaved) {
        if (has_channels(column)) store_columns_of(to, column, 0, factor);
      }
      return;
    }
    const float lower_factor = weight(row + 8) * kUnscale;
#pragma unroll
    for (int column = 0; column < Config::kColumnTiles; column += kInterleaved) {
      if (column * 8 >= first && column * 8 < first + columns && has_channels(column)) {
        if (row < rows) store_columns_of(to, column, 0, factor);
        if (row + 8 < rows) store_columns_of(to + 8 * columns, column, 1, lower_factor);
      }
    }
  }

  static constexpr int kInterleaved = Config::kPairedColumns ? 2 : 1;  // column tiles whose channels take turns

  // Whether this lane's channels of a column tile, or of two that take turns, are inside the head.
  __device__ __forceinline__ bool has_channels(int column) const {
    return kInterleaved == 1 || column * 8 + 2 * kInterleaved * (lane % 4) < Config::kHeadSize;
  }

  // `to`: this lane's channels of column tile 0 in row lane / 4 + 8 * half.
  __device__ __forceinline__ void store_columns_of(float* to, int column, int half, float factor) const {
    const float low = out[column][2 * half] * factor, high = out[column][2 * half + 1] * factor;
    if constexpr (kInterleaved == 1) {
      *reinterpret_cast<float2*>(to + column * 8) = {low, high};
    } else {
      const float* const odd = out[column + 1];
      *reinterpret_cast<float4*>(to + column * 8) = {low, odd[2 * half] * factor, high, odd[2 * half + 1] * factor};
    }
  }
};

}  // namespace cupymla::xl_paged_attention
