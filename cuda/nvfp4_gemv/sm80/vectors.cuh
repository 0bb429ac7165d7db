// b of two phases in shared memory, decoded and in the order in which MMA fragments want it.
#pragma once

#include "../../common/registers.cuh"
#include "../../common/memory.cuh"
#include "factors.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// What the tensor cores multiply: bfloat16 where b is one or carries E8M0 scales, for it has exponents that a half
// lacks.
template <class C>
using OperandOf = conditional_t<C::kVectors == Vectors::bfloat16 || C::kPowers, __nv_bfloat16, __half>;

// Of the factors beside a chunk of a column.
template <class C>
constexpr int kFactorBytes = C::kVectorScales ? C::kRowScales * 4 : 0;

// Where a group of warps has its part of b in a buffer. Eight elements of k that a lane multiplies with one word of a
// are 16 bytes, in the order of `decode`'s pairs. Such units lie so that the four lanes of a quad read neighbouring
// ones and those who write them use all banks: unit j of lane t's piece t is at 4 j + t in the lower half of a chunk,
// that of its piece t + 4 at 4 (j ^ 1) + t in the upper. With Scaling::blocks word t of block i is lane t's, so that
// k stays in order, and at t ^ (i / 2 % 4) among the block's. A column takes 64 bytes more than its elements, for the
// sake of the banks too. Where MMAs multiply integers, elements are bytes in the order of k. Where factors of blocks
// are kept beside the elements, they follow the columns as floats, 16 bytes more for each column.
template <class C>
struct VectorLayout {
  int32_t first;         // byte of a buffer that the group's part begins at
  uint32_t chunks;       // of a phase that are the group's
  int32_t column_bytes;
  int32_t blocks;        // floats from column to column

  __device__ __forceinline__ VectorLayout(const Parameters& params, const Pass<C>& pass, int32_t warp)
      : first(pass.group_of(warp) * (kVectorBytes<C> >> pass.groups_log2)),
        chunks(params.phase_chunks >> pass.groups_log2),
        column_bytes(chunks * C::kVectorChunkBytes + 64), blocks(chunks * C::kRowScales + 4) {}

  // Of the unit that covers elements 8 u to 8 u + 7 of a chunk.
  static __device__ __forceinline__ uint32_t unit_offset(uint32_t u) {
    if constexpr (C::kScaling == Scaling::blocks) return (u ^ (u >> 3 & 3u)) * 16;
    return (u / 16 * 16 + (u % 4 ^ u / 16 % 2) * 4 + u / 4 % 4) * 16;
  }
};

// The pieces of b that threads fetch and decode: 16 bytes, or the block that is brought to a common magnitude.
template <class C>
struct VectorPieces {
  static constexpr bool kNormalized = C::kVectors == Vectors::bfloat16 && C::kScaling == Scaling::columns;
  static constexpr int kLoadElements = C::kVectors == Vectors::e2m1 ? 32 : 8;  // in 16 bytes
  static constexpr int kLoads = kNormalized ? C::kBlock / kLoadElements : 1;
  static constexpr int kElements = kLoads * kLoadElements;
  // How many a thread has registers for, and how many would fill a buffer.
  static constexpr int kMost = 16 / (4 * kLoads);
  static constexpr int kFilling = (kVectorBytes<C> / 2 / kElements + C::kThreads - 1) / C::kThreads;
  static constexpr int kHeld = kFilling < kMost ? kFilling : kMost;
  // Of all columns together, that a phase may have.
  static constexpr int kPhaseElements = kHeld * C::kThreads * kElements;
};

// Asks L2 for rows of bytes: each CTA for its share of the lines.
template <class C>
__device__ __forceinline__ void prefetch_rows(const uint8_t* first_row, uint32_t batches, int64_t batch_stride,
                                              uint32_t rows, int64_t row_stride, int64_t row_bytes) {
  constexpr uint32_t kLine = 128;
  const uint32_t row_lines = static_cast<uint32_t>((row_bytes + kLine - 1) / kLine), step = C::kThreads * gridDim.x;
#pragma unroll 1
  for (uint32_t i = threadIdx.x * gridDim.x + blockIdx.x; i < row_lines * rows * batches; i += step) {
    const uint32_t all_rows = i / row_lines, line = i - all_rows * row_lines, batch = all_rows / rows;
    prefetch_l2(first_row + batch * batch_stride + (all_rows - batch * rows) * row_stride + line * kLine);
  }
}

// What is asked for of b ahead of its use, for all CTAs together, so that what a CTA fetches in later phases has been
// read from memory once, and early.
template <class C>
__device__ __forceinline__ void prefetch_vectors(const Parameters& params) {
  const uint32_t batches = params.items / params.parts;
  const int64_t column_bytes = C::kVectors == Vectors::e2m1 ? params.k / 2 : params.k * 2;
  prefetch_rows<C>(params.b, batches, params.b_batch_bytes, params.n, params.b_row_bytes, column_bytes);
  if constexpr (C::kVectors == Vectors::e2m1) {
    // Columns of the 128x4 layout are 16 bytes apart, in blocks of 512 bytes.
    const int64_t columns = (params.k + C::kBlock - 1) / C::kBlock;
    const uint32_t rows = params.swizzled ? static_cast<uint32_t>((columns + 3) / 4) : params.n;
    const int64_t row_stride = params.swizzled ? 512 : params.sfb_row_bytes;
    const int64_t row_bytes = params.swizzled ? params.n * 16 : columns;
    prefetch_rows<C>(params.sfb, batches, params.sfb_batch_bytes, rows, row_stride, row_bytes);
  }
}

// Decodes pieces of b as they lie in memory to a buffer.
template <class C>
class VectorWriter {
 protected:
  static constexpr bool kNormalized = VectorPieces<C>::kNormalized;
  static constexpr int kLoadElements = VectorPieces<C>::kLoadElements, kPieceLoads = VectorPieces<C>::kLoads;
  static constexpr int kPieceElements = VectorPieces<C>::kElements, kHeld = VectorPieces<C>::kHeld;
  static constexpr int kPieceScales = kPieceElements >= C::kBlock ? kPieceElements / C::kBlock : 1;
  static constexpr uint32_t kChunkPieces = C::kChunk / kPieceElements;
  static constexpr int kElementBits = C::kVectors == Vectors::e2m1 ? 4 : 16;

  struct Held {
    uint32_t words[kPieceLoads][4];
    uint32_t scales[kPieceScales];
  };

  // `piece` of a chunk whose elements are at `target`; its first factor is at `factor`.
  static __device__ __forceinline__ void store_piece(uint8_t* target, float* factor, uint32_t piece,
                                                     const Held& held) {
    if constexpr (C::kVectors == Vectors::e2m1) {
      store_codes(target, factor, piece, held);
    } else if constexpr (kNormalized) {
      store_normalized(target, factor, piece, held);
    } else {
      store_floats(target, piece, held.words[0]);
    }
  }

  // Where a piece may be read whole. The load stays here, ahead of the products that hide it.
  static __device__ __forceinline__ void read_16(uint32_t (&words)[4], const uint8_t* source) {
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(source));
    words[0] = piece.x;
    words[1] = piece.y;
    words[2] = piece.z;
    words[3] = piece.w;
#pragma unroll
    for (int w = 0; w < 4; ++w) make_opaque(words[w]);
  }

  // Byte of the scale of a block of a column. There are no more columns than a quarter of a 128x4 block has rows.
  static __device__ __forceinline__ int64_t scale_place(const Parameters& params, uint32_t column, int64_t block) {
    return params.swizzled ? block / 4 * 512 + column * 16 + block % 4 : column * params.sfb_row_bytes + block;
  }

 private:
  static __device__ __forceinline__ void store_codes(uint8_t* target, float* factor, uint32_t piece,
                                                     const Held& held) {
    if constexpr (C::kPowers) {
      if (held.scales[0] > OnePower::kMost) {
        store_powers(target, piece, held, TwoPowers(held.scales[0]));
      } else {
        store_powers(target, piece, held, OnePower(held.scales[0]));
      }
      return;
    }
    __half2 scales = __float2half2_rn(1.0f);
    if constexpr (C::kMxfp4) {
      *factor = e8m0(held.scales[0]);
    } else {
      scales = halves_of_e4m3(held.scales[0] | held.scales[1] << 8);
    }
    if constexpr (C::kVectorScales && !C::kMxfp4) *reinterpret_cast<float2*>(factor) = __half22float2(scales);
    if constexpr (C::kIntegers) {
      store_integers(target + piece * 32, held);
    } else {
      store_halves(target, piece, held, scales);
    }
  }

  static __device__ __forceinline__ void store_halves(uint8_t* target, uint32_t piece, const Held& held,
                                                      __half2 scales) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pairs[4];
      decode(held.words[0][j], pairs, __half());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // In this order every step is exact: a code times its scale is a multiple of 2^-24.
        if constexpr (!C::kVectorScales) {
          pairs[i] = times(pairs[i], j < 2 ? __low2half2(scales) : __high2half2(scales));
        }
        pairs[i] = times(pairs[i], __float2half2_rn(kDecodeUnit<__half>));
      }
      store(target, piece * 4 + j, pairs);
    }
  }

  static __device__ __forceinline__ void store_integers(uint8_t* target, const Held& held) {
    const ByteDecoder decoder(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t lower[2], upper[2];
      decoder.decode(held.words[0][2 * half], lower);
      decoder.decode(held.words[0][2 * half + 1], upper);
      reinterpret_cast<uint4*>(target)[half] = make_uint4(lower[0], lower[1], upper[0], upper[1]);
    }
  }

  // A block times its E8M0 scale.
  template <class Factors>
  static __device__ __forceinline__ void store_powers(uint8_t* target, uint32_t piece, const Held& held,
                                                      const Factors& factors) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pairs[4];
      decode(held.words[0][j], pairs, __nv_bfloat16());
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = factors.scaled(pairs[i], j);
      store(target, piece * 4 + j, pairs);
    }
  }

  // A block of the only column, brought to magnitudes up to 2^121: codes of a are at 2^-126 of their value, so that the
  // products are back in float32's range. The power of two is taken back by the block's factor, which leaves 2^-14.
  static __device__ __forceinline__ void store_normalized(uint8_t* target, float* factor, uint32_t block,
                                                          const Held& held) {
    uint32_t largest = 0;  // exponent field of the largest finite element
#pragma unroll
    for (int i = 0; i < kPieceLoads; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t low = held.words[i][w] >> 7 & 0xFFu, high = held.words[i][w] >> 23 & 0xFFu;
        largest = max(largest, max(low < 0xFFu ? low : 0u, high < 0xFFu ? high : 0u));
      }
    }
    const uint32_t field = min(120u + 254u - largest, 254u);
    const uint32_t power = field << 7 | field << 23;
#pragma unroll
    for (int i = 0; i < kPieceLoads; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = times(held.words[i][w], *reinterpret_cast<const __nv_bfloat162*>(&power));
      }
      store_floats(target, block * kPieceLoads + i, words);
    }
    *factor = __uint_as_float((127u + 112u + 127u - field) << 23);
  }

  // Eight 16-bit floats in the order of `decode`'s pairs.
  static __device__ __forceinline__ void store_floats(uint8_t* column, uint32_t unit, const uint32_t (&words)[4]) {
    uint32_t pairs[4];
    pair_up<OperandOf<C>>(words, pairs);
    store(column, unit, pairs);
  }

  static __device__ __forceinline__ void store(uint8_t* column, uint32_t unit, const uint32_t (&pairs)[4]) {
    *reinterpret_cast<uint4*>(column + VectorLayout<C>::unit_offset(unit)) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// Brings the parts of b that phases want to shared memory, each group of warps its own: a part is fetched to registers
// while the one before it is multiplied, then decoded, with zeros past k.
template <class C>
class VectorLoader : VectorWriter<C> {
 public:
  __device__ __forceinline__ VectorLoader(Storage<C>& storage, const Parameters& params, int32_t warp)
      : storage_(storage), params_(params), warp_(warp), reciprocal_((65535u + params.n) / params.n) {}

  // Asks for the group's part of the phase that begins with a chunk. Nothing is waited for.
  __device__ __forceinline__ void fetch(const Pass<C>& pass, int32_t first_chunk) {
    const int64_t end = (static_cast<int64_t>(first_chunk) + params_.phase_chunks) * C::kChunk;
    if (params_.b_aligned && end <= params_.k) {
      fetch_pieces<true>(pass, first_chunk);
    } else {
      fetch_pieces<false>(pass, first_chunk);
    }
    holds_ = true;
  }

  // Whether there is a part that has been fetched and not stored.
  __device__ __forceinline__ bool holds() const { return holds_; }

  // Decodes what was fetched into one of the two buffers.
  __device__ __forceinline__ void store(const Pass<C>& pass, int32_t buffer) {
    const VectorLayout<C> layout(params_, pass, warp_);
    uint8_t* vectors = storage_.vectors(buffer) + layout.first;
    float* factors = reinterpret_cast<float*>(vectors + params_.n * layout.column_bytes);
    each_piece(pass, layout, [&](int held, uint32_t column, uint32_t chunk, uint32_t piece) {
      uint8_t* target = vectors + column * layout.column_bytes + chunk * C::kVectorChunkBytes;
      float* factor = factors + column * layout.blocks + chunk * C::kRowScales + piece * kPieceScales;
      Writer::store_piece(target, factor, piece, held_[held]);
    });
    holds_ = false;
  }

 private:
  using Writer = VectorWriter<C>;
  using typename Writer::Held;
  using Writer::kChunkPieces, Writer::kElementBits, Writer::kHeld, Writer::kLoadElements, Writer::kPieceElements;
  using Writer::kPieceLoads, Writer::kPieceScales;

  // kWhole: the phase ends within k, and columns begin at multiples of 16 bytes.
  template <bool kWhole>
  __device__ __forceinline__ void fetch_pieces(const Pass<C>& pass, int32_t first_chunk) {
    const VectorLayout<C> layout(params_, pass, warp_);
    const uint8_t* b = params_.b + pass.batch * params_.b_batch_bytes;
    const uint8_t* sfb = params_.sfb + pass.batch * params_.sfb_batch_bytes;
    const int32_t first = first_chunk + pass.group_of(warp_);
    each_piece(pass, layout, [&](int held, uint32_t column, uint32_t chunk, uint32_t piece) {
      const int64_t element =
          static_cast<int64_t>(first + (chunk << pass.groups_log2)) * C::kChunk + piece * kPieceElements;
#pragma unroll
      for (int i = 0; i < kPieceLoads; ++i) {
        read<kWhole>(held_[held].words[i], b + column * params_.b_row_bytes, element + i * kLoadElements);
      }
      if constexpr (C::kVectors == Vectors::e2m1) {
#pragma unroll
        for (int i = 0; i < kPieceScales; ++i) {
          const bool there = kWhole || element + i * C::kBlock < params_.k;
          held_[held].scales[i] = there ? sfb[Writer::scale_place(params_, column, element / C::kBlock + i)] : 0;
          make_opaque(held_[held].scales[i]);
        }
      }
    });
  }

  // The pieces of this thread. Those of the group are assigned to its threads in turn: all of a chunk and column, then
  // of the next column, then of the next chunk.
  template <typename Function>
  __device__ __forceinline__ void each_piece(const Pass<C>& pass, const VectorLayout<C>& layout,
                                             const Function& function) const {
    // Where pieces are few, groups give them to warps of different schedulers.
    const uint32_t threads = pass.group_threads(), thread = (threadIdx.x + pass.group_of(warp_) * 32) & (threads - 1);
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const uint32_t row = thread / kChunkPieces + held * (threads / kChunkPieces);
      const uint32_t chunk = C::kMostColumns == 1 ? row : row * reciprocal_ >> 16;
      if (chunk < layout.chunks) function(held, row - chunk * params_.n, chunk, thread % kChunkPieces);
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void read(uint32_t (&words)[4], const uint8_t* column, int64_t element) const {
    const int64_t offset = element * kElementBits / 8;
    const int64_t left = params_.k * kElementBits / 8 - offset;
    const uint8_t* source = column + offset;
    if (kWhole || (params_.b_aligned && left >= 16)) {
      Writer::read_16(words, source);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = 0;
        for (int byte = 0; byte < 4; ++byte) {
          if (4 * w + byte < left) words[w] |= static_cast<uint32_t>(source[4 * w + byte]) << (8 * byte);
        }
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) make_opaque(words[w]);
    }
  }

  Storage<C>& storage_;
  const Parameters& params_;
  const int32_t warp_;
  const uint32_t reciprocal_;  // of n, in 2^-16, rounded up: exact for as few rows as there are
  bool holds_ = false;
  Held held_[kHeld];
};

}  // namespace cupymla::nvfp4_gemv
