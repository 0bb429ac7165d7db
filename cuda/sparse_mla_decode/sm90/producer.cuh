// The producer warpgroup: brings in Q and the selected rows of both caches as blocks of swizzled tiles, and says which
// entries are valid. Each warp serves sixteen consecutive entries of a block of 64: lane l looks for the row of entry
// l % 16, and in each of four passes eight lanes bring in a tile's 64 channels of one row.
#pragma once

#include "../../common/memory.cuh"
#include "../../sparse_mla_fwd/sm90/producer.cuh"
#include "cache.cuh"
#include "config.cuh"
#include "convert.cuh"

namespace cupymla::sparse_mla_decode {

constexpr int kTileKeys = 64;

// What a row has to do with: entries that count of each source, and the blocks of them that fall to a CTA. A block has
// entries of one source.
struct Entries {
  int32_t counts[2];
  int32_t first_blocks;  // blocks of the first source
  int32_t begin, end;    // blocks of this CTA, of all

  __device__ __forceinline__ Entries(int32_t first_count, int32_t second_count, uint32_t part, uint32_t parts)
      : counts{first_count, second_count} {
    first_blocks = (counts[0] + kTileKeys - 1) / kTileKeys;
    const int32_t blocks = first_blocks + (counts[1] + kTileKeys - 1) / kTileKeys;
    const int32_t own = (blocks + static_cast<int32_t>(parts) - 1) / static_cast<int32_t>(parts);
    begin = min(static_cast<int32_t>(part) * own, blocks);
    end = min(begin + own, blocks);
  }
};

// By one thread, ahead of the CTA's first barrier: threads that wait for each other must have one answer, whoever
// writes to the lengths meanwhile. Without a slot no entry counts.
__device__ __forceinline__ void read_entries(const Parameters& params, const sparse_mla_fwd::Query& query,
                                             int32_t (&entries)[4]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const Source& source = params.sources[s];
    int32_t count = source.topk;
    if (source.lengths != nullptr) {
      count = max(0, min(count, __ldg(source.lengths + query.batch * source.lengths_batch +
                                      query.query * source.lengths_query)));
    }
    entries[s] = source.slots == 0 ? 0 : count;
  }
}

// By producer threads, before that barrier: asks L2 for the indices that this CTA will want if all entries count, of
// its first source and up to 4096 of them.
__device__ __forceinline__ void prefetch_indices(const Parameters& params, const sparse_mla_fwd::Query& query,
                                                 uint32_t part, uint32_t parts) {
  constexpr int kLineEntries = 32;
  const Entries all(params.sources[0].topk, params.sources[1].topk, part, parts);
  const bool is_second = all.begin >= all.first_blocks;
  const Source& source = params.sources[is_second];
  const int32_t entry = (all.begin - (is_second ? all.first_blocks : 0)) * kTileKeys +
                        static_cast<int32_t>(threadIdx.x % 128) * kLineEntries;
  const int32_t own = (all.end - all.begin) * kTileKeys;
  if (static_cast<int32_t>(threadIdx.x % 128) * kLineEntries < own && entry < source.topk) {
    prefetch_l2(source.indices + query.batch * source.indices_batch + query.query * source.indices_query + entry);
  }
}

template <typename Config, typename Cache, typename Element>
struct Producer {
  using Storage = sparse_mla_fwd::Storage<Config>;
  using State = sparse_mla_fwd::PipelineState<Config>;
  static constexpr bool kCopies = Cache::kFormat == kBf16 && is_same_v<Element, __nv_bfloat16>;
  static constexpr int kWarpKeys = 16;
  static constexpr int kPasses = 4;
  static constexpr int kLastPart = Config::kParts - 1;

  // Tiles that are in registers at a time: two of codes, or one of bf16.
  static constexpr int kCodeSteps = (Cache::kCodeTiles + 1) / 2;
  static constexpr int kSteps = kCodeSteps + Cache::kTiles - Cache::kCodeTiles;
  static __device__ __forceinline__ constexpr int tile_of(int step) {
    return step < kCodeSteps ? 2 * step : step - kCodeSteps + Cache::kCodeTiles;
  }

  // Of a step and pass what this lane loads: eight bytes of each of two tiles, or 16 of one.
  struct Words {
    uint32_t of[kPasses][4];
  };

  Storage& storage;
  const Parameters& params;
  const sparse_mla_fwd::Query query;
  const Entries entries;
  const uint8_t* any_row;
  const int warp = (threadIdx.x / 32) % 4;
  const int lane = threadIdx.x % 32;
  const uint32_t chunk = threadIdx.x % 8;

  __device__ __forceinline__ Producer(Storage& storage, const Parameters& params, const sparse_mla_fwd::Query& query,
                                      const Entries& entries)
      : storage(storage),
        params(params),
        query(query),
        entries(entries),
        any_row(params.sources[entries.counts[0] > 0 ? 0 : 1].cache) {}

  // The slot of this lane's entry of a block, -1 where there is no such entry.
  __device__ __forceinline__ int32_t slot_of(int32_t block) const {
    if (block >= entries.end) return -1;
    const bool is_second = block >= entries.first_blocks;
    const Source& source = params.sources[is_second];
    const int32_t entry = (block - (is_second ? entries.first_blocks : 0)) * kTileKeys + warp * kWarpKeys +
                          lane % kWarpKeys;
    if (entry >= (is_second ? entries.counts[1] : entries.counts[0])) return -1;
    return __ldg(source.indices + query.batch * source.indices_batch + query.query * source.indices_query + entry);
  }

  // And its row, which is asked for from L2 already.
  __device__ __forceinline__ Row row_of(int32_t block, int32_t slot) const {
    const Row row = find_row<Cache>(params.sources[block >= entries.first_blocks], slot, any_row);
    if (!kCopies && row.valid) prefetch(row);
    return row;
  }

  // A row's lines in advance, so that the loads of its channels, few at a time, wait for L2 alone. Two lanes know a row
  // and take its lines in turn. A bulk prefetch would be one instruction for each row, one row after the other.
  __device__ __forceinline__ void prefetch(const Row& row) const {
    constexpr uint32_t kLine = 128;
    constexpr int kLines = (Cache::kRowBytes + kLine - 1) / kLine + 1;  // wherever it begins
    const uint32_t half = lane / kWarpKeys;
    const uint8_t* line = row.data - reinterpret_cast<uint64_t>(row.data) % kLine;
#pragma unroll
    for (uint32_t i = 0; i < kLines; i += 2) {
      const uint8_t* own = line + (i + half) * kLine;
      if (own < row.data + Cache::kRowBytes) prefetch_l2(own);
    }
    if (Cache::kFormat == kV4Fp8 && half == 1) prefetch_l2(row.data + row.scales_at);
  }

  // The entry of a pass that this lane loads of.
  __device__ __forceinline__ uint32_t entry_of(int pass) const { return pass * 4 + lane / 8; }

  struct Places {
    const uint8_t* data[kPasses];
  };

  __device__ __forceinline__ Places places_of(const Row& row) const {
    Places places;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t address = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row.data), entry_of(pass));
      places.data[pass] = reinterpret_cast<const uint8_t*>(address) + chunk * (kCopies ? 16 : 8);
    }
    return places;
  }

  __device__ __forceinline__ void load(Words& words, const Places& places, int step) const {
    const int tile = tile_of(step);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint32_t(&own)[4] = words.of[pass];
      if (tile < Cache::kCodeTiles) {
        load_row_8(own[0], own[1], places.data[pass] + tile * 64);
        if (tile + 1 < Cache::kCodeTiles) load_row_8(own[2], own[3], places.data[pass] + tile * 64 + 64);
      } else {
        const uint8_t* from =
            places.data[pass] + chunk * 8 + (Cache::kWideBegin + (tile - Cache::kCodeTiles) * 128);
        if constexpr (Cache::kHas16ByteRows) {
          load_row_16(own, from);
        } else {
          load_row_8(own[0], own[1], from);
          load_row_8(own[2], own[3], from + 8);
        }
      }
    }
  }

  __device__ __forceinline__ float scale_of(const Scales<Cache>& scales, int pass, int tile) const {
    if constexpr (Cache::kFormat == kV32Fp8) {
      return __uint_as_float(__shfl_sync(0xffffffffu, scales.of[tile / Cache::kScaleTiles], entry_of(pass)));
    } else {
      const uint32_t word = __shfl_sync(0xffffffffu, scales.of[tile / 4], entry_of(pass));
      return power_of_exponent(word >> tile % 4 * 8 & 0xffu);
    }
  }

  // Eight bytes of codes whose NaN are to be put in, where they became elements.
  static __device__ __forceinline__ void put_nan(uint32_t low, uint32_t high, uint32_t address) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = (i < 4 ? low : high) >> i % 4 * 8 & 0x7fu;
      if (code == 0x7fu) store_shared_2(address + i * 2, 0x7fff);
    }
  }

  // Writes the tiles of a step into the block; `tiles` is the address of its first one, `valid_lanes` have a bit for
  // each of the warp's entries. What is not valid becomes zero.
  __device__ __forceinline__ void convert(const Words& words, const Scales<Cache>& scales, uint32_t valid_lanes,
                                          const uint32_t (&destination)[2], uint32_t tiles, int step) const {
    const int tile = tile_of(step);
    uint32_t nan = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t mask = 0u - (valid_lanes >> entry_of(pass) & 1u);
      const uint32_t to = destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + tiles;
      const uint32_t(&own)[4] = words.of[pass];
      if (tile < Cache::kCodeTiles) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (tile + i >= Cache::kCodeTiles) break;
          const Decoder<Element, Cache::kPowersOfTwo> decoder(scale_of(scales, pass, tile + i));
          const uint32_t low = own[2 * i] & mask, high = own[2 * i + 1] & mask;
          store_shared_16(to + i * Config::kTileBytes, decoder(low, high));
          if constexpr (!decltype(decoder)::kKeepsNan) {
            nan |= nan_bits(low & 0x7f7f7f7fu) | nan_bits(high & 0x7f7f7f7fu);
          }
        }
      } else {
        store_shared_16(to, make_uint4(from_bf16<Element>(own[0] & mask), from_bf16<Element>(own[1] & mask),
                                from_bf16<Element>(own[2] & mask), from_bf16<Element>(own[3] & mask)));
      }
    }
    if (!has_nan(nan)) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if ((valid_lanes >> entry_of(pass) & 1u) == 0) continue;
      const uint32_t to = destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + tiles;
      put_nan(words.of[pass][0], words.of[pass][1], to);
      if (tile + 1 < Cache::kCodeTiles) {
        put_nan(words.of[pass][2], words.of[pass][3], to + Config::kTileBytes);
      }
    }
  }

  // Before the first tile of a part: its place in the buffer is free.
  template <typename Buffer>
  __device__ __forceinline__ void enter(int part, const Buffer& buffer) const {
    const int side = Buffer::free_side(part);
    if (side >= 0) storage.free[buffer.stage(part)][side].wait(buffer.free_parity(part));
  }

  // With the last part come the validity words.
  __device__ __forceinline__ void tell_valid(int stage, uint32_t valid_lanes) const {
    if (lane == 0) {
      storage.valid[stage][warp] = static_cast<uint16_t>(valid_lanes);
      storage.full[stage][kLastPart].arrive();
    }
  }

  __device__ __forceinline__ void destinations(uint32_t (&destination)[2]) const {
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) destination[pass] = swizzle_128(warp * kWarpKeys + entry_of(pass), chunk);
  }

  // A block of rows that lie as the products want them.
  template <typename Buffer>
  __device__ __forceinline__ void copy_block(const Places& places, uint32_t valid_lanes, const Buffer& buffer) const {
    uint32_t destination[2];
    destinations(destination);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const int stage = buffer.stage(part);
      enter(part, buffer);
      if (part == kLastPart) tell_valid(stage, valid_lanes);
#pragma unroll
      for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
        const uint32_t tiles = smem_address(storage.k[stage][tile]);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          stream_copy_or_zeros<16>(destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + tiles,
                                   places.data[pass] + tile * 128, valid_lanes >> entry_of(pass) & 1u ? 16 : 0);
        }
      }
      storage.full[stage][part].arrive_after_copies();
    }
  }

  // A block of rows that are converted. While a step is, the next one's loads are under way, of the next block's first
  // step at last: `places` and `scales` are that block's afterwards. The last step is of bf16, which have no scales.
  // `look_ahead` loads what a later block wants. ptxas waits for all loads where it waits for one, so none may be
  // issued just before a step ends: a latency of DRAM would be in every block.
  template <typename Buffer, typename LookAhead>
  __device__ __forceinline__ void convert_block(Words& words, Places& places, Scales<Cache>& scales, const Row& next,
                                                uint32_t valid_lanes, const Buffer& buffer,
                                                LookAhead&& look_ahead) const {
    static_assert(kCopies || kSteps > kCodeSteps);
    uint32_t destination[2];
    destinations(destination);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Words following;
      if (step + 1 < kSteps) {
        load(following, places, step + 1);
      } else {
        places = places_of(next);
        load(following, places, 0);
        scales.load(next);
        look_ahead();
      }
      // Or ptxas puts these loads off until this step's registers are free, as it may into fp16, which takes more.
      if constexpr (is_same_v<Element, __nv_bfloat16>) __syncwarp();
      const int tile = tile_of(step), end = step + 1 < kSteps ? tile_of(step + 1) : Cache::kTiles;
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        if (Config::part_begin(part) == tile) enter(part, buffer);
      }
      const uint32_t tiles = smem_address(storage.k[buffer.stage(0)][tile]);
      convert(words, scales, valid_lanes, destination, tiles, step);
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        if (Config::part_begin(part + 1) != end) continue;
        // Values are multiplied behind the fences of those who take the scores, which is enough as specified; as
        // CUTLASS does it, who writes fences as well.
        fence_async_shared();
        if (part == kLastPart) tell_valid(buffer.stage(part), valid_lanes);
        storage.full[buffer.stage(part)][part].arrive();
      }
      words = following;
    }
  }

  // All blocks of this CTA; `state` is where the small-head variant's ring is behind Q.
  __device__ __forceinline__ void run(State state) {
    if (entries.begin >= entries.end) return;
    int32_t slots[2] = {slot_of(entries.begin), slot_of(entries.begin + 1)};
    Row row = row_of(entries.begin, slots[0]);
    Row next = row_of(entries.begin + 1, slots[1]);
    int32_t slot = slot_of(entries.begin + 2);
    Places places = places_of(row);
    Words words;
    Scales<Cache> scales;
    if constexpr (!kCopies) {
      load(words, places, 0);
      scales.load(row);
    }
    Phases phases;
    for (int32_t block = entries.begin; block < entries.end; ++block) {
      const uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
      int32_t later_slot;
      const auto look_ahead = [&] { later_slot = slot_of(block + 3); };
      const auto fill = [&](const auto& buffer) {
        if constexpr (kCopies) {
          copy_block(places, valid_lanes, buffer);
          places = places_of(next);
          look_ahead();
        } else {
          convert_block(words, places, scales, next, valid_lanes, buffer, look_ahead);
        }
      };
      if constexpr (Config::kSmallHead) {
        fill(state);
        state.advance();
      } else {
        const int buffer = (block - entries.begin) % 2;
        fill(sm90::OneBuffer<Config>{buffer, phases.free(buffer)});
        phases.advance(buffer);
      }
      row = next;
      next = row_of(block + 2, slot);
      slot = later_slot;
    }
  }
};

}  // namespace cupymla::sparse_mla_decode
