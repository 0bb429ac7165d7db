// The producer where two CTAs of neighbouring heads take the same blocks: each converts half of a block's rows, for
// both. A warp brings in eight rows, and looks at the validity of eight more, which the other CTA's same warp brings
// in. Rows come into registers while the block before is converted: so no buffer is waited for before memory is. Only
// those of the last part are asked for at the top of their own block. ptxas waits for all loads where one is needed (it
// counts them by one scoreboard), so none is asked for shortly before a wait.
#pragma once

#include "producer.cuh"

namespace cupymla::sparse_mla_decode {

template <typename Config, typename Cache, typename Element>
struct SharedProducer : Producer<Config, Cache, Element> {
  using Base = Producer<Config, Cache, Element>;
  using typename Base::Places;
  using typename Base::State;
  using typename Base::Storage;
  using Base::chunk, Base::kLastPart, Base::kPasses, Base::lane, Base::storage, Base::warp;
  using Base::high_of, Base::kCodes, Base::low_of;
  static constexpr int kWideTile = Cache::kCodeTiles;  // the last one, of bf16

  static_assert(Config::kSharers == 2 && Base::kOwnKeys == 8 && !Config::kSmallHead);
  static_assert(Cache::kWordTiles % 2 == 0 && Config::part_begin(1) == 2, "a part's scales are in the same words");
  static_assert(Base::kFolds && Cache::kTiles == kWideTile + 1, "other rows do not fit in registers");

  // What a lane has of a block: eight codes of each tile and pass, and eight bf16.
  struct Rows {
    uint64_t codes[Cache::kCodeTiles][kPasses];
    uint64_t wide[kPasses][2];
  };

  using Base::Base;

  // Asks for a tile's share. Zeros of what is not valid.
  __device__ __forceinline__ void load(Rows& rows, const Places& places, uint32_t valid_lanes, int tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool valid = (valid_lanes >> this->entry_of(pass) & 1u) != 0;
      if (tile < Cache::kCodeTiles) {
        rows.codes[tile][pass] = 0;
        if (valid) load_row_8(rows.codes[tile][pass], places.data[pass] + tile * 64);
      } else {
        const uint8_t* from = places.data[pass] + Cache::kWideBegin + chunk * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rows.wide[pass][i] = 0;
          if (valid) load_row_8(rows.wide[pass][i], from + i * 8);
        }
      }
    }
  }

  __device__ __forceinline__ void load_part(Rows& rows, const Places& places, uint32_t valid_lanes, int part) const {
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
      load(rows, places, valid_lanes, tile);
    }
  }

  // Where a part's elements go: into this CTA's buffer, and the other's.
  struct Buffers {
    uint32_t way;   // from an address here to the same one there
    uint32_t full;  // of the part, there

    __device__ __forceinline__ Buffers(const Storage& storage, int part, int stage, uint32_t way) : way(way) {
      full = smem_address(&storage.full[stage][part]) + way;
    }

    __device__ __forceinline__ void store(uint32_t at, const uint4& elements) const {
      store_shared_16(at, elements);
      cluster_store_async_float4(at + way, __uint_as_float(elements.x), __uint_as_float(elements.y),
                                 __uint_as_float(elements.z), __uint_as_float(elements.w), full);
    }
  };

  // Whether this lane has NaN among a part's codes.
  static __device__ __forceinline__ bool has_nan_code(const Rows& rows, int part) {
    uint32_t bits = 0;
#pragma unroll
    for (int tile = Config::part_begin(part); tile < min(Config::part_begin(part + 1), Cache::kCodeTiles); ++tile) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        bits |= nan_bits(low_of(rows.codes[tile][pass])) | nan_bits(high_of(rows.codes[tile][pass]));
      }
    }
    return has_nan(bits);
  }

  // What a lane has of a part's codes, as elements.
  struct Elements {
    uint4 of[2][kPasses];  // tiles of the part
  };

  __device__ __forceinline__ void convert(Elements& elements, const Rows& rows, const uint32_t (&scale_words)[kPasses],
                                          int tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t codes = rows.codes[tile][pass];
      elements.of[tile % 2][pass] =
          eight_bf16(Base::folded(scale_words[pass], tile % 2), low_of(codes), high_of(codes));
#pragma unroll
      for (uint32_t* word : {&elements.of[tile % 2][pass].x, &elements.of[tile % 2][pass].y,
                             &elements.of[tile % 2][pass].z, &elements.of[tile % 2][pass].w}) {
        make_opaque(*word);  // before it is known whether it is stored
      }
    }
  }

  __device__ __forceinline__ void store(const Elements& elements, const Buffers& buffers,
                                        const uint32_t (&destination)[2], int stage, int tile) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      buffers.store(destination[pass] + smem_address(storage.k[stage][tile]), elements.of[tile % 2][pass]);
    }
  }

  // A part's codes, whatever they and their scales are. By all lanes; hardly ever.
  __device__ __forceinline__ void convert_any(int part, const Row& row, const Buffers& buffers, int stage) const {
#pragma unroll 1
    for (int tile = Config::part_begin(part); tile < min(Config::part_begin(part + 1), Cache::kCodeTiles); ++tile) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const auto found = this->find(row, pass);
        uint4 elements = make_uint4(0, 0, 0, 0);
        if (found.valid) {
          uint32_t low, high;
          load_row_8(low, high, found.data + tile * 64 + chunk * 8);
          elements = this->any_elements(found, low, high, tile);
        }
        buffers.store(smem_address(storage.k[stage][0]) + tile * Config::kTileBytes +
                          swizzle_128(this->first_key() + this->entry_of(pass), chunk),
                      elements);
      }
    }
  }

  // And of the tile of bf16.
  __device__ __forceinline__ void store_wide(const Rows& rows, const Buffers& buffers,
                                             const uint32_t (&destination)[2], int stage) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t first = rows.wide[pass][0], second = rows.wide[pass][1];
      buffers.store(destination[pass] + smem_address(storage.k[stage][kWideTile]),
                    make_uint4(low_of(first), high_of(first), low_of(second), high_of(second)));
    }
  }

  // Says that this thread's rows of a part are in, and one thread what comes from the other CTA. With the last part
  // come the validity words, of all rows.
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

  // All blocks of a row of this CTA, which are the other's as well.
  template <typename LoadQuery>
  __device__ __forceinline__ void run(const LoadQuery& load_query, Phases& phases) {
    const int32_t begin = this->entries.begin, end = this->entries.end;
    State state;
    typename Base::Ahead ahead = this->nothing_ahead();
    if (!this->rehearses) {
      ahead = this->begin_with(load_query, state);
      if (begin >= end) return;
    }
    Row row = ahead.row, next = ahead.next;
    int32_t slot = ahead.slot;
    uint32_t destination[2];
    this->destinations(destination);
    for (uint32_t& to : destination) make_opaque(to);  // not to be worked out again
    uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
    Scales<Cache> scales;
    scales.load(row, this->is_own());
    Rows rows;
    Places places = this->template places_of<kCodes>(row);
#pragma unroll
    for (int part = 0; part < kLastPart; ++part) load_part(rows, places, valid_lanes, part);
    const uint32_t here = smem_address(&storage);
    uint32_t way = cluster_address(here, asked_rank() ^ 1u) - here;
    make_opaque(way);
    int32_t block = begin;
#pragma unroll 1
    do {
      const bool is_live = this->is_live();
      const auto buffer = this->take_buffer(state, phases, block);
      const int stage = buffer.stage(0);
      uint32_t scale_words[kPasses];
      const bool odd = !scales.fold();
      // Of each part, whether it has what does not fold. Waits for the loads before.
      bool any[Config::kParts];
#pragma unroll
      for (int part = 0; part < kLastPart; ++part) any[part] = __any_sync(0xffffffffu, odd | has_nan_code(rows, part));
      load_part(rows, places, valid_lanes, kLastPart);
      const uint32_t next_valid = __ballot_sync(0xffffffffu, next.valid);
      places = this->template places_of<kCodes>(next);
      Scales<Cache> next_scales;
      next_scales.load(next, this->is_own());
      const int32_t later_slot = this->slot_of(block + 3);
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        if (part == 1) any[kLastPart] = __any_sync(0xffffffffu, odd | has_nan_code(rows, kLastPart));
        this->take_scales(scales, scale_words);
        scales.next_part();
        const int begin_tile = Config::part_begin(part);
        const int tiles = min(Config::part_begin(part + 1), Cache::kCodeTiles) - begin_tile;
        Elements elements;
#pragma unroll
        for (int i = 0; i < tiles; ++i) convert(elements, rows, scale_words, begin_tile + i);
        if (is_live) {
          this->enter(part, buffer);
          const Buffers buffers(storage, part, stage, way);
          if (!any[part]) {
#pragma unroll
            for (int i = 0; i < tiles; ++i) store(elements, buffers, destination, stage, begin_tile + i);
          } else {
            convert_any(part, row, buffers, stage);
          }
          if (part == kLastPart) store_wide(rows, buffers, destination, stage);
          tell(part, stage, valid_lanes);
        }
        if (part == 1) load_part(rows, places, next_valid, 0);
        if (part == 1 || part == 2) load_part(rows, places, next_valid, part);
      }
      valid_lanes = next_valid;
      scales = next_scales;
      row = next;
      next = this->row_of(block + 2, slot);
      slot = later_slot;
    } while (++block < end);
  }
};

}  // namespace cupymla::sparse_mla_decode
