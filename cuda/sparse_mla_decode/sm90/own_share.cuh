// Where one CTA converts all rows of its blocks with many heads: the producer makes the left half of the value columns
// (left_producer.cuh), the consumer that owns a block the right half, while it waits for the block anyway. Codes of two
// tiles wait where one will be, each warp's in the rows that it converts.
//
// barrier     | arrivals                  | who waits  | what it says
// ------------+---------------------------+------------+-----------------------------------------------------------
// codes_in[b] | 128 producers, 128 copies | owner of b | codes of the right half and the tile behind it are in
//             |                           |            | buffer b, scales and validity as well
// full[b][2]  | not used, nor full[b][3]  |            | the owner has these parts from codes_in[b] and from itself
// named 3, 4  | 128 consumer              | the same   | all its warps have converted their rows of a block
#pragma once

#include "producer.cuh"

namespace cupymla::sparse_mla_decode {

template <typename Config, typename Cache, typename Element>
struct OwnShare : Producer<Config, Cache, Element> {
  using Base = Producer<Config, Cache, Element>;
  using typename Base::Codes;
  using typename Base::Storage;
  using Base::kPasses, Base::storage;
  static constexpr int kFirst = Config::part_begin(Config::kLeftParts);
  static constexpr int kTiles = Cache::kCodeTiles - kFirst;  // 4, or 3
  static_assert(Base::kFolds && (kTiles == 3 || kTiles == 4));
  static_assert(kFirst == 4 && Config::kBuffers <= Config::kConsumers, "where their scales are");

  // Where two tiles come, no codes of later ones wait.
  static constexpr bool codes_are_read_first() {
    for (int first = kFirst; first < Cache::kCodeTiles; first += 2) {
      for (int later = first + 2; later < Cache::kCodeTiles; ++later) {
        if (Base::kCodesFirst + later / 2 <= first + 1) return false;
      }
    }
    return true;
  }
  static_assert(codes_are_read_first());

  __device__ __forceinline__ explicit OwnShare(Storage& storage, const Parameters& params,
                                               const sparse_mla_fwd::Query& query)
      : Base(storage, params, query, Entries(0, 0, 0, 1)) {}

  // A warp's rows of the block in a buffer, two tiles at a time: a tile comes over its own codes and those of tiles
  // before.
  __device__ __forceinline__ void run(int stage, uint32_t parity) const {
    storage.codes_in[stage].wait(parity);
    uint32_t destination[2];
    this->destinations(destination);
    // A loop: its code is there three times.
#pragma unroll 1
    for (int i = 0; i < kTiles; i += 2) {
      const bool has_second = kTiles % 2 == 0 || i + 1 < kTiles;
      Codes codes[2];
      this->read(codes[0], stage, kFirst + i);
      this->read(codes[1], stage, kFirst + i + 1, has_second);
      uint32_t nan = 0;
#pragma unroll
      for (const Codes& each : codes) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) nan |= nan_bits(each.low[pass]) | nan_bits(each.high[pass]);
      }
      Scales<Cache> exact;
      exact.load_late(storage, stage, this->first_key() + this->lane % Base::kWarpKeys, i);
      Scales<Cache> scales = exact;
      const bool odd = !scales.fold() || has_nan(nan);
      __syncwarp();  // all lanes have read
      const bool any_odd = __any_sync(0xffffffffu, odd);
      uint32_t scale_words[kPasses];
      this->take_scales(scales, scale_words);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        if (which == 1 && !has_second) break;
        const uint32_t to_tile = smem_address(storage.k[stage][kFirst + i + which]);
        if (!any_odd) {
          this->convert(codes[which], scales, scale_words, nan, destination, to_tile, which);
        } else {
          convert_any(codes[which], exact, destination, to_tile, which);
        }
      }
    }
    fence_async_shared();
  }

  // A tile whatever codes and scales are; hardly ever.
  __device__ __forceinline__ void convert_any(const Codes& codes, const Scales<Cache>& exact,
                                              const uint32_t (&destination)[2], uint32_t to_tile, int which) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      store_shared_16(
          destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile,
          eight_elements<Element>(codes.low[pass], codes.high[pass], this->scale_of(exact, pass, which)));
    }
  }
};

}  // namespace cupymla::sparse_mla_decode
