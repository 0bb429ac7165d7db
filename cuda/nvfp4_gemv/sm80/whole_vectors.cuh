// b of whole calls: where pieces are is worked out once, and steps from phase to phase.
#pragma once

#include "vectors.cuh"

namespace cupymla::nvfp4_gemv {

// As VectorLoader, for the phases of the only pass in their order. What lies past k is not fetched, nor multiplied.
template <class C>
class WholeVectors : VectorWriter<C> {
 public:
  __device__ __forceinline__ WholeVectors(Storage<C>& storage, const Parameters& params)
      : storage_(storage), phase_chunks_(static_cast<int32_t>(params.phase_chunks)),
        chunks_(static_cast<int32_t>(static_cast<uint32_t>(params.k) / C::kChunk)),
        four_scales_step_(params.swizzled ? 512 : 4) {}

  // Works out where this thread's pieces are. To be called once, before the rest.
  __device__ __forceinline__ void begin(const Parameters& params, const Pass<C>& pass, int32_t warp, int32_t lane) {
    const VectorLayout<C> layout(params, pass, warp);
    const uint32_t group = pass.group_of(warp), threads = pass.group_threads();
    // Where pieces are few, groups give them to warps of different schedulers.
    const uint32_t thread = ((warp + group) * 32 + lane) & (threads - 1);
    const uint32_t reciprocal = (65535u + params.n) / params.n;  // exact for as few rows as there are
    const uint8_t* b = params.b + pass.batch * params.b_batch_bytes;
    const uint8_t* sfb = params.sfb + pass.batch * params.sfb_batch_bytes;
    piece_ = thread % kChunkPieces;
    // Pieces past k are decoded as well, whatever they hold; which way it is done goes by their scales.
    if constexpr (C::kPowers && kCodes) {
#pragma unroll
      for (int held = 0; held < kHeld; ++held) held_[held].scales[0] = 0;
    }
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const uint32_t row = thread / kChunkPieces + held * (threads / kChunkPieces);
      const uint32_t chunk = kOneColumn ? row : row * reciprocal >> 16;
      const uint32_t column = kOneColumn ? 0 : row - chunk * params.n;
      const uint32_t chunk_of_k = group + (chunk << pass.groups_log2);
      if (held == 0 || !kOneColumn) {
        const uint32_t element = chunk_of_k * C::kChunk + piece_ * kPieceElements;
        chunk_[held] = static_cast<int32_t>(chunk_of_k);
        sources_[held] = b + column * params.b_row_bytes + element / 8 * kElementBits;
        if constexpr (kCodes) scales_[held] = sfb + Writer::scale_place(params, column, element / C::kBlock);
      }
      targets_[held] = chunk >= layout.chunks ? kNowhere
                                              : layout.first + column * layout.column_bytes +
                                                    chunk * C::kVectorChunkBytes;
      factors_[held] = layout.first + params.n * layout.column_bytes +
                       (column * layout.blocks + chunk * C::kRowScales + piece_ * kPieceScales) * 4;
    }
  }

  // Asks for the group's part of the next phase. Nothing is waited for.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const int at = kOneColumn ? 0 : held, steps = held - at;
      if (targets_[held] != kNowhere && chunk_[at] + steps * kPieceChunks < chunks_) {
        const uint8_t* source = sources_[at] + steps * kPieceChunks * kChunkBytes;
#pragma unroll
        for (int i = 0; i < kPieceLoads; ++i) {
          Writer::read_16(held_[held].words[i], source + i * (kLoadElements / 8) * kElementBits);
        }
        if constexpr (kCodes) {
          const uint8_t* scales = scales_[at] + steps * kPieceChunks * (C::kRowScales / 4) * four_scales_step_;
#pragma unroll
          for (int i = 0; i < kPieceScales; ++i) {
            held_[held].scales[i] = scales[i];
            make_opaque(held_[held].scales[i]);
          }
        }
      }
    }
#pragma unroll
    for (int at = 0; at < kPlaces; ++at) {
      chunk_[at] += phase_chunks_;
      sources_[at] += phase_chunks_ * kChunkBytes;
      if constexpr (kCodes) scales_[at] += phase_chunks_ * (C::kRowScales / 4) * four_scales_step_;
    }
  }

  // Decodes what was fetched into one of the two buffers.
  __device__ __forceinline__ void store(int32_t buffer) {
    uint8_t* vectors = storage_.vectors(buffer);
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      if (targets_[held] != kNowhere) {
        float* factor = reinterpret_cast<float*>(vectors + factors_[held]);
        Writer::store_piece(vectors + targets_[held], factor, piece_, held_[held]);
      }
    }
  }

 private:
  using Writer = VectorWriter<C>;
  using typename Writer::Held;
  using Writer::kChunkPieces, Writer::kElementBits, Writer::kHeld, Writer::kLoadElements, Writer::kPieceElements;
  using Writer::kPieceLoads, Writer::kPieceScales;

  static constexpr bool kCodes = C::kVectors == Vectors::e2m1;
  static constexpr bool kOneColumn = C::kMostColumns == 1;
  // Pieces of one column are equally far apart: all are found from the first.
  static constexpr int kPlaces = kOneColumn ? 1 : kHeld;
  static constexpr uint32_t kNowhere = ~0u;
  static constexpr int kPieceChunks = C::kThreads / static_cast<int>(kChunkPieces);
  static constexpr int kChunkBytes = C::kChunk / 8 * kElementBits;

  Storage<C>& storage_;
  const int32_t phase_chunks_, chunks_, four_scales_step_;
  uint32_t piece_;
  int32_t chunk_[kPlaces];  // of k, which the next fetch takes the piece from
  const uint8_t* sources_[kPlaces];
  const uint8_t* scales_[kPlaces];
  // Bytes of a buffer; kNowhere where no phase has the piece.
  uint32_t targets_[kHeld], factors_[kHeld];
  Held held_[kHeld];
};

}  // namespace cupymla::nvfp4_gemv
