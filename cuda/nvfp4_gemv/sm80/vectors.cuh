// b of one phase in shared memory, decoded and in the order in which MMA fragments want it.
#pragma once

#include "../../common/prefetch.cuh"
#include "decode.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// What the tensor cores multiply: bfloat16 where b is one, for it has exponents that a half lacks.
template <Vectors kVectors>
struct OperandOf {
  using Type = __half;
  using Pair = __half2;
};
template <>
struct OperandOf<Vectors::bfloat16> {
  using Type = __nv_bfloat16;
  using Pair = __nv_bfloat162;
};

// Eight elements of k that a lane multiplies with one word of a are 16 bytes, in the order of `decode`'s pairs. Such
// units follow each other so that the four lanes of a quad read neighbouring ones: unit j of lane t's piece t or t + 4
// is at 4 j + t in its half of a chunk; with Scaling::blocks word t of a block is lane t's, so that k stays in order.
// A column takes 64 bytes more than its elements, for the sake of the banks. Where factors of blocks are kept beside
// the elements, they follow the columns as floats.
template <class C>
class VectorLayout {
 public:
  __device__ __forceinline__ explicit VectorLayout(int32_t phase_chunks)
      : column_bytes(phase_chunks * C::kChunk * 2 + 64), blocks(phase_chunks * C::kRowScales) {}

  // Of the unit that covers elements 8 u to 8 u + 7 of the phase.
  static __device__ __forceinline__ uint32_t unit_offset(uint32_t u) {
    if constexpr (C::kScaling == Scaling::blocks) return u * 16;
    return (u / 16 * 16 + u % 4 * 4 + u / 4 % 4) * 16;
  }

  int32_t column_bytes;
  int32_t blocks;
};

// Asks for the first phase's part of b before the stream's stages are asked for, behind which it would have to wait.
template <class C>
__device__ __forceinline__ void prefetch_vectors(const Parameters& params, uint32_t batch) {
  constexpr int64_t kLine = 128;
  const int64_t elements = min(params.k, static_cast<int64_t>(params.phase_chunks) * C::kChunk);
  const int64_t bytes = C::kVectors == Vectors::e2m1 ? elements / 2 : elements * 2;
  const uint32_t lines = static_cast<uint32_t>((bytes + kLine - 1) / kLine);
  const uint8_t* b = params.b + batch * params.b_batch_bytes;
  for (uint32_t i = threadIdx.x; i < lines * params.n; i += C::kThreads) {
    const uint32_t column = i / lines, line = i % lines;
    prefetch_l2(b + column * params.b_row_bytes + line * kLine);
  }
}

// Decodes the phase's part of b, with zeros past k.
template <class C>
class VectorLoader {
 public:
  __device__ __forceinline__ VectorLoader(Storage<C>& storage, const Parameters& params, uint32_t batch,
                                          int32_t first_chunk, int32_t chunks)
      : storage_(storage), params_(params), layout_(params.phase_chunks), b_(params.b + batch * params.b_batch_bytes),
        sfb_(params.sfb + batch * params.sfb_batch_bytes), first_(static_cast<int64_t>(first_chunk) * C::kChunk),
        elements_(chunks * C::kChunk) {}

  __device__ __forceinline__ void run() const {
    if constexpr (kNormalized) {
      for (uint32_t block = threadIdx.x; block < elements_ / C::kBlock; block += C::kThreads) load_normalized(block);
    } else {
      const uint32_t pieces = elements_ / kPieceElements;
      for (uint32_t i = threadIdx.x; i < pieces * params_.n; i += C::kThreads) load(i / pieces, i % pieces);
      if constexpr (C::kVectorScales) load_scales();
    }
  }

 private:
  static constexpr int kPieceElements = C::kVectors == Vectors::e2m1 ? 32 : 8;  // 16 bytes of b
  static constexpr bool kNormalized = C::kVectors == Vectors::bfloat16 && C::kScaling == Scaling::columns;

  // A 16-byte piece of a column.
  __device__ __forceinline__ void load(uint32_t column, uint32_t piece) const {
    const int64_t element = first_ + piece * kPieceElements;
    uint32_t words[4];
    read(words, column, element);
    uint8_t* target = storage_.vectors() + column * layout_.column_bytes;
    if constexpr (C::kVectors == Vectors::e2m1) {
      __half2 scales = __float2half2_rn(1.0f);
      if constexpr (!C::kVectorScales) {
        scales = halves_of_e4m3(scale(column, element) | scale(column, element + 16) << 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t pairs[4];
        decode(words[j], pairs, __half());
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // In this order every step is exact: a code times its scale is a multiple of 2^-24.
          pairs[i] = times(pairs[i], j < 2 ? __low2half2(scales) : __high2half2(scales));
          pairs[i] = times(pairs[i], __float2half2_rn(kDecodeUnit<__half>));
        }
        store(target, piece * 4 + j, pairs);
      }
    } else {
      store_floats(target, piece, words);
    }
  }

  // A block of the only column, brought to magnitudes up to 2^121: codes of a are at 2^-126 of their value, so that the
  // products are back in float32's range. The power of two is taken back by the block's factor, which leaves 2^-14.
  __device__ __forceinline__ void load_normalized(uint32_t block) const {
    constexpr int kBlockPieces = C::kBlock / 8;
    uint32_t words[kBlockPieces][4];
    uint32_t largest = 0;  // exponent field of the largest finite element
#pragma unroll
    for (int i = 0; i < kBlockPieces; ++i) {
      read(words[i], 0, first_ + block * C::kBlock + 8 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t low = words[i][w] >> 7 & 0xFFu, high = words[i][w] >> 23 & 0xFFu;
        largest = max(largest, max(low < 0xFFu ? low : 0u, high < 0xFFu ? high : 0u));
      }
    }
    const uint32_t field = min(120u + 254u - largest, 254u);
    const uint32_t power = field << 7 | field << 23;
#pragma unroll
    for (int i = 0; i < kBlockPieces; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[i][w] = times(words[i][w], *reinterpret_cast<const __nv_bfloat162*>(&power));
      }
      store_floats(storage_.vectors(), block * kBlockPieces + i, words[i]);
    }
    factors()[block] = __uint_as_float((127u + 112u + 127u - field) << 23);
  }

  // Eight 16-bit floats in the order of `decode`'s pairs.
  static __device__ __forceinline__ void store_floats(uint8_t* column, uint32_t unit, const uint32_t (&words)[4]) {
    uint32_t pairs[4];
    pair_up<typename OperandOf<C::kVectors>::Type>(words, pairs);
    store(column, unit, pairs);
  }

  static __device__ __forceinline__ void store(uint8_t* column, uint32_t unit, const uint32_t (&pairs)[4]) {
    *reinterpret_cast<uint4*>(column + VectorLayout<C>::unit_offset(unit)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }

  __device__ __forceinline__ void read(uint32_t (&words)[4], uint32_t column, int64_t element) const {
    constexpr int kElementBits = C::kVectors == Vectors::e2m1 ? 4 : 16;
    const int64_t offset = element * kElementBits / 8;
    const int64_t left = params_.k * kElementBits / 8 - offset;
    const uint8_t* source = b_ + column * params_.b_row_bytes + offset;
    if (params_.b_aligned && left >= 16) {
      const uint4 piece = __ldg(reinterpret_cast<const uint4*>(source));
      words[0] = piece.x;
      words[1] = piece.y;
      words[2] = piece.z;
      words[3] = piece.w;
      return;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = 0;
      for (int byte = 0; byte < 4; ++byte) {
        if (4 * w + byte < left) words[w] |= static_cast<uint32_t>(source[4 * w + byte]) << (8 * byte);
      }
    }
  }

  // The code of the scale of an element; zero past k.
  __device__ __forceinline__ uint32_t scale(uint32_t column, int64_t element) const {
    if (element >= params_.k) return 0;
    const int64_t columns = (params_.k + C::kBlock - 1) / C::kBlock;
    const int64_t at = element / C::kBlock;
    return params_.swizzled ? sfb_[swizzled_scale(column, at, (columns + 3) / 4)]
                            : sfb_[column * params_.sfb_row_bytes + at];
  }

  __device__ __forceinline__ float* factors() const {
    return reinterpret_cast<float*>(storage_.vectors() + params_.n * layout_.column_bytes);
  }

  __device__ __forceinline__ void load_scales() const {
    const uint32_t blocks = elements_ / C::kBlock;
    for (uint32_t i = threadIdx.x; i < blocks * params_.n; i += C::kThreads) {
      const uint32_t column = i / blocks, block = i % blocks;
      const uint32_t code = scale(column, first_ + block * C::kBlock);
      factors()[column * layout_.blocks + block] = C::kMxfp4 ? e8m0(code) : __low2float(halves_of_e4m3(code));
    }
  }

  Storage<C>& storage_;
  const Parameters& params_;
  const VectorLayout<C> layout_;
  const uint8_t* const b_;
  const uint8_t* const sfb_;
  const int64_t first_;
  const uint32_t elements_;
};

}  // namespace cupymla::nvfp4_gemv
