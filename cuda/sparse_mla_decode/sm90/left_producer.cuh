// The producer where consumers convert the right half of the value columns (own_share.cuh). It converts the left half,
// from registers: a row's codes are asked for when those of the block before are converted, before there is room for
// them. The others go into their buffer as they are, once that is free.
#pragma once

#include "producer.cuh"

namespace cupymla::sparse_mla_decode {

template <typename Config, typename Cache, typename Element>
struct LeftProducer : Producer<Config, Cache, Element> {
  using Base = Producer<Config, Cache, Element>;
  using typename Base::Places;
  using typename Base::State;
  using typename Base::Storage;
  using Base::chunk, Base::high_of, Base::kCopyBytes, Base::kPasses, Base::lane, Base::low_of, Base::storage;
  static constexpr int kTiles = Config::part_begin(Config::kLeftParts);
  static_assert(Base::kFolds && Config::kSharers == 1 && !Config::kSmallHead);
  static_assert(kCopyBytes == 8 || !Cache::kPowersOfTwo, "both tiles of a part have one scale");

  // What a lane has of a block, as much as it copies at a time: eight codes of each tile, or sixteen side by side of
  // one tile of two.
  struct Rows {
    uint64_t codes[kTiles][kPasses];
  };

  using Base::Base;

  // Asks for a part's share. Zeros of what is not valid.
  __device__ __forceinline__ void load(Rows& rows, const Row& row, uint32_t valid_lanes, int part) const {
    const Places places = this->template places_of<kCopyBytes>(row);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint64_t &first = rows.codes[2 * part][pass], &second = rows.codes[2 * part + 1][pass];
      const uint8_t* from = places.data[pass] + part * 128;
      first = second = 0;
      if ((valid_lanes >> this->entry_of(pass) & 1u) != 0) {
        if constexpr (kCopyBytes == 16) {
          load_row_16(first, second, from);
        } else {
          load_row_8(first, from);
          load_row_8(second, from + 64);
        }
      }
    }
  }

  // What consumers and products take of a block as it is, once the right half of its buffer is free.
  template <typename Buffer>
  __device__ __forceinline__ void bring_right(const Row& row, uint32_t valid_lanes, const Buffer& buffer) const {
    this->enter(Config::kLeftParts, buffer);
    const Places places = this->template places_of<kCopyBytes>(row);
    this->template copy_tiles<kTiles>(places, valid_lanes, buffer.stage(0));
    storage.codes_in[buffer.stage(0)].arrive_after_copies();
  }

  // Scales and validity, for the owner of a buffer, who has read those before once it frees its half: of the first
  // buffer the left one, of the second the right one.
  template <typename Buffer>
  __device__ __forceinline__ void tell_scales(uint32_t valid_lanes, const Scales<Cache>& scales,
                                              const Buffer& buffer) const {
    const int stage = buffer.stage(0);
    if (lane < Base::kWarpKeys) scales.store_late(storage, stage, this->first_key() + lane);
    if (lane == 0) storage.valid[stage][this->warp] = static_cast<uint16_t>(valid_lanes);
  }

  // All blocks of this CTA.
  template <typename LoadQuery>
  __device__ __forceinline__ void run(const LoadQuery& load_query, Phases& phases) {
    const int32_t begin_block = this->entries.begin, end_block = this->entries.end;
    State state;
    typename Base::Ahead ahead = this->nothing_ahead();
    if (!this->rehearses) {
      ahead = this->begin_with(load_query, state);
      if (begin_block >= end_block) return;
    }
    Row row = ahead.row, next = ahead.next;
    int32_t slot = ahead.slot;
    // Of a lane's eight codes of each tile; or of both halves of its sixteen codes of one tile. Those of the second
    // tile come in the other order: neighbours meet each bank once.
    const bool in_second = kCopyBytes == 16 && chunk / 4 != 0;
    uint32_t destination[2][2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int pass = 0; pass < 2; ++pass) {
        const uint32_t place = kCopyBytes == 16 ? chunk % 4 * 2 + (chunk / 4 ^ which) : chunk;
        destination[which][pass] =
            swizzle_128(this->first_key() + this->entry_of(pass), place) + (in_second ? Config::kTileBytes : 0);
      }
    }
    uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
    Scales<Cache> scales;
    scales.load(row, true);
    Rows rows;
#pragma unroll
    for (int part = 0; part < Config::kLeftParts; ++part) load(rows, row, valid_lanes, part);
    int32_t block = begin_block;
#pragma unroll 1
    do {
      const bool is_live = this->is_live();
      const auto buffer = this->take_buffer(state, phases, block);
      const int stage = buffer.stage(0);
      // Of the first of two buffers the left half is free long before the right one, of the other both are at once.
      const bool right_first = block == begin_block || (block - begin_block) % 2 != 0;
      if (is_live) {
        if (right_first) {
          bring_right(row, valid_lanes, buffer);
        } else {
          this->enter(0, buffer);
        }
        tell_scales(valid_lanes, scales, buffer);
        if (right_first) {
          storage.codes_in[stage].arrive();
          this->enter(0, buffer);
        }
      }
      const uint32_t odd_lanes = __ballot_sync(0xffffffffu, !scales.fold());
      const uint32_t next_valid = __ballot_sync(0xffffffffu, next.valid);
      Scales<Cache> next_scales;
      next_scales.load(next, true);
#pragma unroll
      for (int part = 0; part < Config::kLeftParts; ++part) {
        uint32_t scale_words[kPasses], nan = 0;
        this->take_scales(scales, scale_words);
        scales.next_part();
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
          for (int which = 0; which < 2; ++which) {
            uint64_t codes = rows.codes[2 * part + which][pass];
            uint32_t to_tile = smem_address(storage.k[stage][2 * part]);
            if constexpr (kCopyBytes == 16) {
              if (in_second) codes = rows.codes[2 * part + 1 - which][pass];
            } else {
              to_tile += which * Config::kTileBytes;
            }
            const uint32_t low = low_of(codes), high = high_of(codes);
            store_shared_16_if(is_live, destination[which][pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile,
                               eight_bf16(Base::folded(scale_words[pass], which), low, high));
            nan |= nan_bits(low) | nan_bits(high);
          }
        }
        load(rows, next, next_valid, part);
        if (is_live) {
          if (__any_sync(0xffffffffu, odd_lanes != 0 || has_nan(nan))) {
            this->template repair<kCopyBytes>(part, row, odd_lanes, buffer);
          }
          storage.full[stage][part].arrive();
        }
      }
      if (is_live && !right_first) {
        bring_right(row, valid_lanes, buffer);
        storage.codes_in[stage].arrive();
      }
      valid_lanes = next_valid;
      scales = next_scales;
      row = next;
      next = this->row_of(block + 2, slot);
      slot = this->slot_of(block + 3);
    } while (++block < end_block);
  }
};

}  // namespace cupymla::sparse_mla_decode
