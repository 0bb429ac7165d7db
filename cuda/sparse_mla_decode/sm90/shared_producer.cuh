// The producer where two CTAs of neighbouring heads take the same blocks: each converts half of a block's rows, for both.
// A warp brings in eight rows, and looks at the validity of eight more, which the other CTA's same warp brings in. Rows
// come into registers while the block before is converted: so no buffer is waited for before memory is.
#pragma once

#include "producer.cuh"

namespace cupymla::sparse_mla_decode {

template <typename Config, typename Cache, typename Element>
struct SharedProducer : Producer<Config, Cache, Element> {
  using Base = Producer<Config, Cache, Element>;
  using typename Base::Codes;
  using typename Base::State;
  using Base::chunk, Base::kLastPart, Base::kPasses, Base::lane, Base::storage, Base::warp;
  static constexpr int kWideTile = Cache::kCodeTiles;  // the last one, of bf16

  static_assert(Config::kSharers == 2 && Base::kOwnKeys == 8 && !Config::kSmallHead);
  static_assert(Cache::kCodeTiles > 0 && Cache::kTiles == kWideTile + 1, "rows of bf16 do not fit in registers");

  // What a lane has of a block: eight codes of each tile and pass, and eight bf16.
  struct Rows {
    Codes codes[Cache::kCodeTiles];
    uint4 wide[kPasses];
  };

  using Base::Base;

  // The places of a lane's codes.
  struct Places {
    const uint8_t* data[kPasses];
  };

  __device__ __forceinline__ Places places_of(const Row& row) const {
    Places places;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t address =
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row.data), this->entry_of(pass));
      places.data[pass] = reinterpret_cast<const uint8_t*>(address) + chunk * 8;
    }
    return places;
  }

  // Asks for a tile's share. Zeros of what is not valid.
  __device__ __forceinline__ void load(Rows& rows, const Places& places, uint32_t valid_lanes, int tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool valid = (valid_lanes >> this->entry_of(pass) & 1u) != 0;
      if (tile < Cache::kCodeTiles) {
        uint32_t low = 0, high = 0;
        if (valid) load_row_8(low, high, places.data[pass] + tile * 64);
        rows.codes[tile].low[pass] = low, rows.codes[tile].high[pass] = high;
      } else {
        uint4 wide = make_uint4(0, 0, 0, 0);
        const uint8_t* from = places.data[pass] + Cache::kWideBegin + chunk * 8;
        if (valid) {
          load_row_8(wide.x, wide.y, from);
          load_row_8(wide.z, wide.w, from + 8);
        }
        rows.wide[pass] = wide;
      }
    }
  }

  // Writes a tile as elements into this CTA's buffer.
  __device__ __forceinline__ void write(const Rows& rows, const Scales<Cache>& scales, uint32_t (&scale_words)[kPasses],
                                        uint32_t& nan, const uint32_t (&destination)[2], uint32_t to_tile,
                                        int tile) const {
    if (tile < Cache::kCodeTiles) {
      this->take_scales(scales, scale_words, tile);
      this->convert(rows.codes[tile], scales, scale_words, nan, destination, to_tile, tile);
      return;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4 wide = rows.wide[pass];
      store_shared_16(destination[pass] + to_tile, make_uint4(from_bf16<Element>(wide.x), from_bf16<Element>(wide.y),
                                                              from_bf16<Element>(wide.z), from_bf16<Element>(wide.w)));
    }
  }

  // Stores to the other CTA what this lane has written of a part.
  __device__ __forceinline__ void hand_over(int part, int stage, const uint32_t (&destination)[2]) const {
    const uint32_t here = smem_address(&storage);
    const uint32_t way = cluster_address(here, asked_rank() ^ 1u) - here;
    const uint32_t full = smem_address(&storage.full[stage][part]) + way;
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const uint32_t at = destination[pass] + smem_address(storage.k[stage][tile]);
        uint32_t own[4];
        load_shared_16(own, at);
        cluster_store_async_float4(at + way, __uint_as_float(own[0]), __uint_as_float(own[1]), __uint_as_float(own[2]),
                                   __uint_as_float(own[3]), full);
      }
    }
  }

  // Says that this thread's rows of a part are in, and one thread what comes from the other CTA. With the last part come
  // the validity words, of all rows.
  __device__ __forceinline__ void tell(int part, int stage, uint32_t valid_lanes) const {
    constexpr uint32_t kOtherBytes = Config::kTileBytes / 2;  // of a tile
    if (part == kLastPart && lane == 0) {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(storage.valid[stage]);
      bytes[this->first_key() / 8] = static_cast<uint8_t>(valid_lanes);
      bytes[this->first_key(1) / 8] = static_cast<uint8_t>(valid_lanes >> 8);
      storage.full[stage][part].arrive();
    }
    if (warp == 0 && lane == 0) {
      const uint32_t tiles = Config::part_begin(part + 1) - Config::part_begin(part);
      storage.full[stage][part].arrive_and_expect(tiles * kOtherBytes);
    } else {
      storage.full[stage][part].arrive();
    }
  }

  // All blocks of this CTA, which are the other's as well.
  __device__ __forceinline__ void run(State state) {
    const int32_t begin = this->entries.begin, end = this->entries.end;
    if (begin >= end) return;
    uint32_t destination[2];
    this->destinations(destination);
    const int32_t slots[2] = {this->slot_of(begin), this->slot_of(begin + 1)};
    Row row = this->row_of(begin, slots[0]);
    Row next = this->row_of(begin + 1, slots[1]);
    int32_t slot = this->slot_of(begin + 2);
    Phases phases;
    uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
    Scales<Cache> scales;
    scales.load(row, this->is_own());
    Rows rows;
    const Places first = places_of(row);
#pragma unroll
    for (int tile = 0; tile < Cache::kTiles; ++tile) load(rows, first, valid_lanes, tile);
    for (int32_t block = begin; block < end; ++block) {
      const auto buffer = this->take_buffer(state, phases, block);
      const int stage = buffer.stage(0);
      const uint32_t next_valid = __ballot_sync(0xffffffffu, next.valid);
      const Places places = places_of(next);
      Scales<Cache> next_scales;
      next_scales.load(next, this->is_own());
      uint32_t odd_lanes = 0, nan = 0, scale_words[kPasses];
      if constexpr (Base::kFolds) odd_lanes = __ballot_sync(0xffffffffu, !scales.fold());
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        this->enter(part, buffer);
#pragma unroll
        for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
          write(rows, scales, scale_words, nan, destination, smem_address(storage.k[stage][tile]), tile);
          load(rows, places, next_valid, tile);
        }
        if constexpr (Base::kFolds) {
          if (__any_sync(0xffffffffu, odd_lanes != 0 || has_nan(nan))) this->repair(part, row, odd_lanes, buffer);
          nan = 0;
        }
        hand_over(part, stage, destination);
        fence_async_shared();
        tell(part, stage, valid_lanes);
      }
      valid_lanes = next_valid;
      scales = next_scales;
      row = next;
      next = this->row_of(block + 2, slot);
      slot = this->slot_of(block + 3);
    }
  }
};

}  // namespace cupymla::sparse_mla_decode
