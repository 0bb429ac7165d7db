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
  using Base::chunk, Base::high_of, Base::kCodes, Base::kPasses, Base::lane, Base::low_of, Base::storage;
  static constexpr int kTiles = Config::part_begin(Config::kLeftParts);
  static_assert(Base::kFolds && Config::kSharers == 1 && !Config::kSmallHead);

  // What a lane has of a block.
  struct Rows {
    uint64_t codes[kTiles][kPasses];
  };

  using Base::Base;

  // Asks for a tile's share. Zeros of what is not valid.
  __device__ __forceinline__ void load(Rows& rows, const Places& places, uint32_t valid_lanes, int tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      rows.codes[tile][pass] = 0;
      if ((valid_lanes >> this->entry_of(pass) & 1u) != 0) {
        load_row_8(rows.codes[tile][pass], places.data[pass] + tile * 64);
      }
    }
  }

  // What consumers and products take of a block as it is, once there is room: the right half is free when all that is
  // told here about the block before in that buffer has been read.
  template <typename Buffer>
  __device__ __forceinline__ void begin(const Places& places, uint32_t valid_lanes, const Scales<Cache>& scales,
                                        const Buffer& buffer) const {
    const int stage = buffer.stage(0);
    this->enter(Config::kLeftParts, buffer);
    Places wide = places;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) wide.data[pass] += chunk * (Base::kCopyBytes - kCodes);
    this->template copy_tiles<kTiles>(wide, valid_lanes, stage);
    storage.codes_in[stage].arrive_after_copies();
    if (lane < Base::kWarpKeys) scales.store_late(storage, stage, this->first_key() + lane);
    if (lane == 0) storage.valid[stage][this->warp] = static_cast<uint16_t>(valid_lanes);
    storage.codes_in[stage].arrive();
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
    uint32_t destination[2];
    this->destinations(destination);
    uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
    Scales<Cache> scales;
    scales.load(row, true);
    Rows rows;
    auto buffer = this->take_buffer(state, phases, begin_block);
    {
      const Places first = this->template places_of<kCodes>(row);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) load(rows, first, valid_lanes, tile);
      if (!this->rehearses) begin(first, valid_lanes, scales, buffer);
    }
    int32_t block = begin_block;
#pragma unroll 1
    do {
      const bool is_live = this->is_live();
      const int stage = buffer.stage(0);
      const bool more = block + 1 < end_block;
      // Consumers free both buffers of a pair one soon after the other.
      const bool early = (block - begin_block) % 2 == 0;
      const uint32_t next_valid = __ballot_sync(0xffffffffu, next.valid);
      const Places places = this->template places_of<kCodes>(next);
      Scales<Cache> next_scales;
      next_scales.load(next, true);
      const uint32_t odd_lanes = __ballot_sync(0xffffffffu, !scales.fold());
      auto next_buffer = buffer;
      const auto begin_next = [&] {
        next_buffer = this->take_buffer(state, phases, block + 1);
        begin(places, next_valid, next_scales, next_buffer);
      };
      if (is_live) this->enter(0, buffer);
#pragma unroll
      for (int part = 0; part < Config::kLeftParts; ++part) {
        uint32_t scale_words[kPasses], nan = 0;
        this->take_scales(scales, scale_words);
        scales.next_part();
#pragma unroll
        for (int tile = 2 * part; tile < 2 * part + 2; ++tile) {
#pragma unroll
          for (int pass = 0; pass < kPasses; ++pass) {
            const uint32_t low = low_of(rows.codes[tile][pass]), high = high_of(rows.codes[tile][pass]);
            store_shared_16_if(
                is_live,
                destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + smem_address(storage.k[stage][tile]),
                eight_bf16(Base::folded(scale_words[pass], tile % 2), low, high));
            nan |= nan_bits(low) | nan_bits(high);
          }
          load(rows, places, next_valid, tile);
        }
        if (is_live) {
          if (__any_sync(0xffffffffu, odd_lanes != 0 || has_nan(nan))) this->repair(part, row, odd_lanes, buffer);
          storage.full[stage][part].arrive();
        }
        if (part == 0 && more && early) begin_next();
      }
      if (more && !early) begin_next();
      buffer = next_buffer;
      valid_lanes = next_valid;
      scales = next_scales;
      row = next;
      next = this->row_of(block + 2, slot);
      slot = this->slot_of(block + 3);
    } while (++block < end_block);
  }
};

}  // namespace cupymla::sparse_mla_decode
