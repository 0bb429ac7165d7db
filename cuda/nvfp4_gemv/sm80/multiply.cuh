// Multiplies stages of a with the vectors in shared memory.
#pragma once

#include "../../common/math.cuh"
#include "../../common/warp_mma.cuh"
#include "vectors.cuh"

namespace cupymla::nvfp4_gemv {

// What products of bytes are to be multiplied with to have their value: each is twice its code's.
constexpr float kIntegerUnit = 0.25f;

// 1.5 * 2^23: where integer sums begin, so that their bits, taken for a float's, are that float plus the sum, exactly.
constexpr uint32_t kIntegerZero = 0x4B400000u;

// What sums are to be multiplied with to have their value.
template <class C>
constexpr float kSumUnit = C::kIntegers && !C::kMxfp4      ? kIntegerUnit
                           : !C::kPowers                   ? kDecodeUnit<OperandOf<C>>
                           : C::kVectors == Vectors::e2m1 ? kPowerUnit * kPowerUnit
                                                          : kPowerUnit;

// One warp's part of a tile. Lane 4 g + t sums rows g and g + 8: columns 2t and 2t + 1 of each column block, or, with
// Scaling::columns, its share of the only column, in places 0 and 2.
template <class C>
class Product {
 public:
  using Operand = OperandOf<C>;
  using Stage = typename Storage<C>::Stage;

  float sums[C::kColumnBlocks][4];

  // Once the storage's zeros are there.
  __device__ __forceinline__ Product(Storage<C>& storage, const Parameters& params, int32_t warp, int32_t lane)
      : storage_(storage), params_(params), warp_(warp), lane_(lane), row_(lane / 4), quad_lane_(lane % 4),
        decoder_(C::kIntegers ? *reinterpret_cast<const volatile uint32_t*>(storage.zeros) : 0u) {
    const bool mine = row_ % 4 == quad_lane_;
    mine_[0] = mine && row_ < 4;
    mine_[1] = mine && row_ >= 4;
  }

  // From now on b is what the warp's group has in one of the buffers.
  __device__ __forceinline__ void use(const Pass<C>& pass, int32_t buffer) {
    const VectorLayout<C> layout(params_, pass, warp_);
    const uint8_t* vectors = storage_.vectors(buffer) + layout.first;
    const float* factors = reinterpret_cast<const float*>(vectors + params_.n * layout.column_bytes);
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block) {
      // Columns past n repeat the last one; nobody reads their sums.
      const uint32_t column = min(block * 8u + row_, params_.n - 1);
      fragments_[block] = vectors + column * layout.column_bytes + quad_lane_ * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        vector_scales_[block][i] = factors + min(block * 8u + quad_lane_ * 2 + i, params_.n - 1) * layout.blocks;
      }
    }
    if constexpr (C::kIntegers) {
      fragments_[0] = vectors + row_ * 32;
    } else if constexpr (C::kScaling == Scaling::columns) {
      fragments_[0] = vectors + quad_lane_ * 16 + row_ / 4 * 256;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[block][i] = 0.0f;
    }
  }

  // Adds the products of a stage; `chunk` counts the group's chunks of the phase.
  __device__ __forceinline__ void add(int32_t stage, int32_t chunk) {
    const Stage& codes = storage_.ring[warp_][stage];
    if constexpr (C::kScaling == Scaling::codes) {
      add_codes(codes, chunk);
    } else if constexpr (C::kScaling == Scaling::blocks) {
      add_blocks(codes, chunk);
    } else {
      add_columns(codes, chunk);
    }
  }

  // Brings together what lanes hold of one sum. To be called once, when all stages are in.
  __device__ __forceinline__ void finish() {
    if constexpr (C::kScaling == Scaling::columns) {
      sums[0][0] = quad_sum(sums[0][0]);
      sums[0][2] = quad_sum(sums[0][2]);
    }
  }

 private:
  // Of the word of a piece in one half of a chunk, where VectorLayout has it.
  __device__ __forceinline__ uint4 fragment(int block, int32_t chunk, int half, int word) const {
    const uint8_t* units = fragments_[block] + chunk * (C::kChunk * 2) + half * 256;
    return *reinterpret_cast<const uint4*>(units + (word ^ half) * 64);
  }

  // Of a block of 32 elements: those that belong to this lane's word of it.
  __device__ __forceinline__ uint4 block_fragment(int block, int32_t chunk, int index) const {
    const int32_t word = static_cast<int32_t>(quad_lane_), place = word ^ (index >> 1 & 3);
    const uint8_t* units = fragments_[block] + chunk * (C::kChunk * 2) + index * 64;
    return *reinterpret_cast<const uint4*>(units + (place - word) * 16);
  }

  // Codes carry their scales into the MMA. A stage with an E8M0 scale that is too large for one factor takes two.
  __device__ __forceinline__ void add_codes(const Stage& stage, int32_t chunk) {
    if constexpr (!C::kPowers) {
      add_scaled_codes<E4m3Factors<Operand>>(stage, chunk);
    } else {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest = max(largest, static_cast<uint32_t>(stage.scales[row_ + i / 2 * 8][i % 2 * 4 + quad_lane_]));
      }
      if (__any_sync(0xffffffffu, largest > OnePower::kMost)) {
        add_scaled_codes<TwoPowers>(stage, chunk);
      } else {
        add_scaled_codes<OnePower>(stage, chunk);
      }
    }
  }

  template <class Factors>
  __device__ __forceinline__ void add_scaled_codes(const Stage& stage, int32_t chunk) {
    constexpr int kPieceScales = 32 / C::kBlock;
    float chain[C::kColumnBlocks][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t piece = half * 4 + quad_lane_;
      const uint4 codes[2] = {piece_of(stage, 0, piece), piece_of(stage, 1, piece)};
      const Factors factors[2] = {Factors(stage.scales[row_] + kPieceScales * piece),
                                  Factors(stage.scales[row_ + 8] + kPieceScales * piece)};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t rows[2][4];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          decode(word_of(codes[upper], word), rows[upper], Operand());
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[upper][i] = factors[upper].scaled(rows[upper][i], word);
        }
#pragma unroll
        for (int block = 0; block < C::kColumnBlocks; ++block) {
          multiply_unit(chain[block], rows, fragment(block, chunk, half, word));
        }
      }
    }
    // Tensor cores round towards zero at every step, so their sums are kept short.
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[block][i] += chain[block][i];
    }
  }

  // E8M0 scales reach past what halves can carry, so each block of 32 is summed on its own and then scaled.
  __device__ __forceinline__ void add_blocks(const Stage& stage, int32_t chunk) {
    float(&scales)[C::kTileRows][C::kRowScales] = storage_.scales[warp_];
    const uint32_t packed = reinterpret_cast<const uint32_t*>(stage.scales)[lane_];
    const float2 low = e8m0_pair(packed & 0xFFFFu), high = e8m0_pair(packed >> 16);
    reinterpret_cast<float4*>(scales)[lane_] = make_float4(low.x, low.y, high.x, high.y);
    __syncwarp();
    // As many blocks at a time as registers allow.
    constexpr int kGroup = 4 / C::kColumnBlocks;
#pragma unroll 1
    for (int first = 0; first < C::kRowScales; first += kGroup) {
      float rows[2][kGroup], columns[C::kColumnBlocks][2][kGroup];
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) read_floats(rows[upper], &scales[row_ + 8 * upper][first]);
      if constexpr (C::kVectors == Vectors::e2m1) {
#pragma unroll
        for (int block = 0; block < C::kColumnBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            read_floats(columns[block][i], vector_scales_[block][i] + chunk * C::kRowScales + first);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        float chain[C::kColumnBlocks][4] = {};
        add_block(chain, stage, chunk, first + j);
#pragma unroll
        for (int block = 0; block < C::kColumnBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float scale = rows[i / 2][j];
            if constexpr (C::kVectors == Vectors::e2m1) scale *= columns[block][i % 2][j];
            sums[block][i] = fmaf(chain[block][i], scale, sums[block][i]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_block(float (&chain)[C::kColumnBlocks][4], const Stage& stage, int32_t chunk,
                                            int index) {
    uint32_t rows[2][4];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const uint8_t* piece = stage.codes[row_ + 8 * upper] + ((index ^ stage_swizzle(row_)) << 4);
      decode(*reinterpret_cast<const uint32_t*>(piece + 4 * quad_lane_), rows[upper], Operand());
    }
#pragma unroll
    for (int block = 0; block < C::kColumnBlocks; ++block) {
      multiply_unit(chain[block], rows, block_fragment(block, chunk, index));
    }
  }

  // With one vector only, column p of the MMA takes piece p of it and zeros for the other pieces, so that its sums are
  // those of the piece: a block of MXFP4, or two of NVFP4, in two chains of MMAs.
  __device__ __forceinline__ void add_columns(const Stage& stage, int32_t chunk) {
    constexpr int kChains = C::kMxfp4 ? 1 : 2;
    float chains[kChains][4] = {};
    if constexpr (C::kIntegers) {
      multiply_integers(chains, stage, chunk);
    } else {
      multiply_pieces(chains, stage, chunk);
    }
    add_chains(chains, stage, chunk);
  }

  // Blocks' sums to their rows, with their scales.
  template <int kChains>
  __device__ __forceinline__ void add_chains(const float (&chains)[kChains][4], const Stage& stage, int32_t chunk) {
    constexpr int kScales = 2 * kChains;  // of two pieces
    float vector_scales[kScales];
    if constexpr (C::kVectorScales) {
      read_floats(vector_scales, vector_scales_[0][0] + chunk * C::kRowScales + quad_lane_ * kScales);
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float scales[kScales];
      read_row_scales(scales, stage.scales[row_ + 8 * upper] + quad_lane_ * kScales);
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        float product = chains[i % kChains][2 * upper + i / kChains];
        // Two scales may be far apart where their product is not; a power of two belongs to the products.
        if constexpr (C::kVectors == Vectors::e2m1) scales[i] *= vector_scales[i];
        if constexpr (C::kVectors == Vectors::bfloat16) product *= vector_scales[i];
        sums[0][2 * upper] = fmaf(product, scales[i], sums[0][2 * upper]);
      }
    }
  }

  template <int kChains>
  __device__ __forceinline__ void multiply_pieces(float (&chains)[kChains][4], const Stage& stage,
                                                  int32_t chunk) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t piece = half * 4 + quad_lane_;
      uint4 codes[2];
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) codes[upper] = piece_of(stage, upper, piece);
      const uint8_t* vector = mine_[half] ? fragments_[0] + chunk * (C::kChunk * 2) : storage_.zeros + 64;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t rows[2][4];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) decode(word_of(codes[upper], word), rows[upper], Operand());
        const uint4 unit = *reinterpret_cast<const uint4*>(vector + (word ^ half) * 64);
        multiply_unit(chains[kChains == 1 ? 0 : word / 2], rows, unit);
      }
    }
  }

  // Codes as bytes. Positive ones and negative ones have MMAs of their own, so that no code needs its sign put to it;
  // the difference of their sums is exact.
  template <int kChains>
  __device__ __forceinline__ void multiply_integers(float (&chains)[kChains][4], const Stage& stage,
                                                    int32_t chunk) const {
    constexpr uint32_t zeros[4] = {kIntegerZero, kIntegerZero, kIntegerZero, kIntegerZero};
    uint32_t sums[2][kChains][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t piece = half * 4 + quad_lane_;
      const uint4 codes[2] = {piece_of(stage, 0, piece), piece_of(stage, 1, piece)};
      // Zeros are read from banks that pieces' halves leave alone.
      const uint8_t* vector = mine_[half] ? fragments_[0] + chunk * C::kVectorChunkBytes : storage_.zeros + 16;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int chain = kChains == 1 ? 0 : word / 2;
        const bool first = half == 0 && word % (4 / kChains) == 0;
        uint32_t rows[2][4];  // [sign], as the MMA wants them
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          uint32_t positive[2], negative[2];
          decoder_.decode(word_of(codes[upper], word), positive, negative);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            rows[0][upper + 2 * i] = positive[i];
            rows[1][upper + 2 * i] = negative[i];
          }
        }
        const uint4 units = reinterpret_cast<const uint4*>(vector)[word / 2];
        const uint32_t b0 = word % 2 == 0 ? units.x : units.z, b1 = word % 2 == 0 ? units.y : units.w;
#pragma unroll
        for (int sign = 0; sign < 2; ++sign) {
          uint32_t(&sum)[4] = sums[sign][chain];
          if (first) {
            mma_16x8x32(sum, rows[sign], b0, b1, zeros);
          } else {
            mma_16x8x32(sum, rows[sign], b0, b1, sum);
          }
        }
      }
    }
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        chains[chain][i] = __uint_as_float(sums[0][chain][i]) - __uint_as_float(sums[1][chain][i]);
        // E8M0 scales take sums to both ends of what a float holds: there they are kept as those of halves are.
        if constexpr (C::kMxfp4) chains[chain][i] *= kIntegerUnit / kDecodeUnit<Operand>;
      }
    }
  }

  __device__ __forceinline__ uint4 piece_of(const Stage& stage, int upper, uint32_t piece) const {
    const uint32_t place = (piece ^ stage_swizzle(row_)) << 4;
    return *reinterpret_cast<const uint4*>(stage.codes[row_ + 8 * upper] + place);
  }

  static __device__ __forceinline__ void read_row_scales(float (&scales)[4], const uint8_t* codes) {
    const uint32_t packed = *reinterpret_cast<const uint32_t*>(codes);
    const float2 low = __half22float2(halves_of_e4m3(packed & 0xFFFFu));
    const float2 high = __half22float2(halves_of_e4m3(packed >> 16));
    scales[0] = low.x;
    scales[1] = low.y;
    scales[2] = high.x;
    scales[3] = high.y;
  }

  static __device__ __forceinline__ void read_row_scales(float (&scales)[2], const uint8_t* codes) {
    const uint32_t packed = *reinterpret_cast<const uint16_t*>(codes);
    const float2 pair = e8m0_pair(packed);
    scales[0] = pair.x;
    scales[1] = pair.y;
  }

  // Two steps of k16: pairs 0 and 1, then 2 and 3, of one word of two rows.
  static __device__ __forceinline__ void multiply_unit(float (&chain)[4], const uint32_t (&rows)[2][4],
                                                       const uint4& unit) {
    const uint32_t first[4] = {rows[0][0], rows[1][0], rows[0][1], rows[1][1]};
    const uint32_t second[4] = {rows[0][2], rows[1][2], rows[0][3], rows[1][3]};
    mma_16x8x16<Operand>(chain, first, unit.x, unit.y);
    mma_16x8x16<Operand>(chain, second, unit.z, unit.w);
  }

  static __device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
  static __device__ __forceinline__ void read_floats(float (&values)[4], const float* source) {
    const float4 read = *reinterpret_cast<const float4*>(source);
    values[0] = read.x;
    values[1] = read.y;
    values[2] = read.z;
    values[3] = read.w;
  }
  static __device__ __forceinline__ void read_floats(float (&values)[2], const float* source) {
    const float2 read = *reinterpret_cast<const float2*>(source);
    values[0] = read.x;
    values[1] = read.y;
  }

  Storage<C>& storage_;
  const Parameters& params_;
  const int32_t warp_, lane_;
  const uint32_t row_, quad_lane_;
  const uint8_t* fragments_[C::kColumnBlocks];
  const float* vector_scales_[C::kColumnBlocks][2];
  const ByteDecoder decoder_;  // of integer MMAs
  bool mine_[2];  // Scaling::columns: whether this lane's column takes its piece of that half
};

}  // namespace cupymla::nvfp4_gemv
