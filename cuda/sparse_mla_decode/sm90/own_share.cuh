// Where one CTA converts all rows of its blocks with many heads: the producer makes the left half of the value columns
// (left_producer.cuh), the consumer that owns a block the right half, while it waits for the block anyway. Codes of two
// tiles wait where one will be, each warp's in the rows that it converts.
//
// barrier            | arrivals       | who waits  | what it says
// -------------------+----------------+------------+-------------------------------------------------------------------
// codes_in[b]        | 128 producers, | owner of b | what it converts of the block in buffer b is in as it is, and
//                    | 128 copies     |            | scales are in
// full[b][2]         | not used       |            | the owner has the third part from itself
// full[b][3]         | 128 copies, 4  | as in the  | the tile behind and validity are in
//                    | for validity   | forward    |
// named 3, 4         | 128 consumer   | the same   | all its warps have converted their rows of a block
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

  __device__ __forceinline__ explicit OwnShare(Storage& storage, const Parameters& params,
                                               const sparse_mla_fwd::Query& query)
      : Base(storage, params, query, Entries(0, 0, 0, 1)) {}

  // A warp's rows of the block in a buffer, two tiles at a time. Their codes are read before anything is written where
  // they wait.
  __device__ __forceinline__ void run(int stage, uint32_t parity) const {
    storage.codes_in[stage].wait(parity);
    uint32_t destination[2];
    this->destinations(destination);
    Scales<Cache> exact;
    exact.load_late(storage, stage, this->first_key() + this->lane % Base::kWarpKeys);
    Scales<Cache> scales = exact;
    const bool odd = __any_sync(0xffffffffu, !scales.fold());
#pragma unroll
    for (int first = 0; first < kTiles; first += 2) {
      const int count = first + 1 < kTiles ? 2 : 1;
      Codes codes[2];
      uint32_t nan = 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        this->read(codes[i], stage, kFirst + first + i);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) nan |= nan_bits(codes[i].low[pass]) | nan_bits(codes[i].high[pass]);
      }
      __syncwarp();
      const uint32_t to_tile = smem_address(storage.k[stage][kFirst + first]);
      if (!__any_sync(0xffffffffu, odd || has_nan(nan))) {
        uint32_t scale_words[kPasses];
        this->take_scales(scales, scale_words);
#pragma unroll
        for (int i = 0; i < count; ++i) {
          this->convert(codes[i], scales, scale_words, nan, destination, to_tile + i * Config::kTileBytes, i);
        }
      } else {
        convert_any(codes, count, exact, destination, to_tile);
      }
      scales.next_part();
      exact.next_part();
    }
    fence_async_shared();
  }

  // Two tiles whatever codes and scales are; hardly ever.
  __device__ __forceinline__ void convert_any(const Codes (&codes)[2], int count, const Scales<Cache>& exact,
                                              const uint32_t (&destination)[2], uint32_t to_tile) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        store_shared_16(destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile + i * Config::kTileBytes,
                        eight_elements<Element>(codes[i].low[pass], codes[i].high[pass],
                                                this->scale_of(exact, pass, i)));
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_decode
