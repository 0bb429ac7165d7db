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
  static constexpr bool kFolds = Cache::kCodeTiles > 0 && is_same_v<Element, __nv_bfloat16>;
  static constexpr int kWarpKeys = 16;
  static constexpr int kPasses = 4;
  static constexpr int kLastPart = Config::kParts - 1;

  // What is loaded at a time: a tile of codes, or half of the warp's entries of a tile of bf16.
  static constexpr int kSteps = Cache::kCodeTiles + 2 * (Cache::kTiles - Cache::kCodeTiles);
  // Two steps are loaded while two are converted.
  static constexpr int kAhead = 2;
  static constexpr int kPairs = (kSteps + 1) / 2;
  static __device__ __forceinline__ constexpr bool is_code(int step) { return step < Cache::kCodeTiles; }
  static __device__ __forceinline__ constexpr int tile_of(int step) {
    return is_code(step) ? step : Cache::kCodeTiles + (step - Cache::kCodeTiles) / 2;
  }
  static __device__ __forceinline__ constexpr int first_pass(int step) {
    return is_code(step) ? 0 : (step - Cache::kCodeTiles) % 2 * 2;
  }
  static_assert(kAhead < kSteps);

  // Of a step what this lane loads: eight bytes of each pass, or 16 of each of two passes.
  struct Words {
    uint32_t of[8];
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
    if (is_code(step)) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        load_row_8(words.of[2 * pass], words.of[2 * pass + 1], places.data[pass] + tile * 64);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t(&own)[4] = reinterpret_cast<uint32_t(&)[4]>(words.of[4 * i]);
      const uint8_t* from =
          places.data[first_pass(step) + i] + chunk * 8 + (Cache::kWideBegin + (tile - Cache::kCodeTiles) * 128);
      if constexpr (Cache::kHas16ByteRows) {
        load_row_16(own, from);
      } else {
        load_row_8(own[0], own[1], from);
        load_row_8(own[2], own[3], from + 8);
      }
    }
  }

  // The scale of a tile of a pass's entry, from what its finder loaded.
  __device__ __forceinline__ float scale_of(const Scales<Cache>& scales, int pass, int tile) const {
    const uint32_t word = __shfl_sync(0xffffffffu, scales.of[tile / Cache::kWordTiles], entry_of(pass));
    return Cache::kPowersOfTwo ? power_of_exponent(word >> tile % 4 * 8 & 0xffu) : __uint_as_float(word);
  }

  // What multiplies a tile's codes, from `words_of_scales`.
  static __device__ __forceinline__ auto folded(uint32_t word, int tile) {
    if constexpr (Cache::kPowersOfTwo) {
      return FoldedPower(word, tile % 4);
    } else {
      return FoldedScale(word);
    }
  }

  // Scales of a step's entries, where those of the step before are others.
  __device__ __forceinline__ void take_scales(const Scales<Cache>& scales, uint32_t (&scale_words)[kPasses],
                                              int step) const {
    if constexpr (kFolds) {
      if (!is_code(step) || step % Cache::kWordTiles != 0) return;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        scale_words[pass] = __shfl_sync(0xffffffffu, scales.of[step / Cache::kWordTiles], entry_of(pass));
      }
    }
  }

  static __device__ __forceinline__ constexpr int items(int step) { return is_code(step) ? kPasses : 2; }

  // Writes one of a step's items into the block; `to_tile` is the address of its tile, `valid_lanes` have a bit for
  // each of the warp's entries, `scale_words` those of the entries that this lane loads of. `nan` gets bits that
  // `has_nan` knows. What is not valid is finite.
  __device__ __forceinline__ void convert(const Words& words, const Scales<Cache>& scales,
                                          const uint32_t (&scale_words)[kPasses], uint32_t valid_lanes, uint32_t& nan,
                                          const uint32_t (&destination)[2], uint32_t to_tile, int step,
                                          int item) const {
    const int pass = first_pass(step) + item;
    const uint32_t address = destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile;
    const uint32_t mask = valid_lanes >> entry_of(pass) & 1u ? ~0u : 0u;
    if (!is_code(step)) {
      const uint32_t* own = words.of + 4 * item;
      store_shared_16(address, make_uint4(from_bf16<Element>(own[0] & mask), from_bf16<Element>(own[1] & mask),
                                          from_bf16<Element>(own[2] & mask), from_bf16<Element>(own[3] & mask)));
      return;
    }
    const uint32_t low = words.of[2 * pass], high = words.of[2 * pass + 1];
    if constexpr (kFolds) {
      store_shared_16(address, eight_bf16(folded(scale_words[pass], step), low, high));
      nan |= nan_bits(low) | nan_bits(high);
    } else {
      store_shared_16(address, eight_elements<Element>(low & mask, high & mask, scale_of(scales, pass, step)));
    }
  }

  // Once more the codes of a part's tiles, of rows whose scale does not fold and of eight codes with NaN among them. By
  // all lanes; hardly ever.
  template <typename Buffer>
  __device__ __forceinline__ void repair(int part, const Row& row, uint32_t odd_lanes,
                                         const uint32_t (&destination)[2], const Buffer& buffer) const {
#pragma unroll 1
    for (int tile = Config::part_begin(part); tile < min(Config::part_begin(part + 1), Cache::kCodeTiles); ++tile) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int entry = entry_of(pass);
        const auto base = reinterpret_cast<const uint8_t*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row.data), entry));
        const uint8_t* scales = base + __shfl_sync(0xffffffffu, static_cast<long long>(row.scales_at), entry);
        if (!__shfl_sync(0xffffffffu, static_cast<int>(row.valid), entry)) continue;
        uint32_t low, high;
        load_row_8(low, high, base + tile * 64 + chunk * 8);
        if ((odd_lanes >> entry & 1u) == 0 && !has_nan(nan_bits(low) | nan_bits(high))) continue;
        float scale;
        if constexpr (Cache::kPowersOfTwo) {
          scale = power_of_exponent(__ldg(scales + tile));
        } else {
          scale = __ldg(reinterpret_cast<const float*>(scales) + tile / Cache::kWordTiles);
        }
        store_shared_16(destination[pass % 2] + pass / 2 * kSwizzleAtomBytes +
                            smem_address(storage.k[buffer.stage(0)][0]) + tile * Config::kTileBytes,
                        eight_elements<Element>(low, high, scale));
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

  // A block of rows that are converted. While a step is, the loads of the next kAhead are under way, at last those of
  // the next block's first ones: `places` and `scales` are that block's afterwards. The last steps are of bf16, which
  // have no scales. `look_ahead` loads what a later block wants. ptxas waits for all loads where it waits for one, so
  // none may be issued just before a step ends: a latency of DRAM would be in every block.
  template <typename Buffer, typename LookAhead>
  __device__ __forceinline__ void convert_block(Words (&words)[kAhead], Places& places, Scales<Cache>& scales,
                                                const Row& row, const Row& next, uint32_t valid_lanes,
                                                const Buffer& buffer,
                                                LookAhead&& look_ahead) const {
    static_assert(kCopies || kSteps > Cache::kCodeTiles);
    uint32_t destination[2];
    destinations(destination);
    uint32_t odd_lanes = 0, nan = 0, scale_words[kPasses];
    if constexpr (kFolds) odd_lanes = __ballot_sync(0xffffffffu, !scales.fold());
    Scales<Cache> next_scales;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      Words later[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = 2 * pair + i;
        if (step >= kSteps) break;
        const int tile = tile_of(step);
        const bool begins = first_pass(step) == 0, ends = step + 1 == kSteps || tile_of(step + 1) != tile;
        const uint32_t to_tile = smem_address(storage.k[buffer.stage(0)][tile]);
        if (i == 0 && pair + 1 == kPairs) places = places_of(next);
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
          if (begins && Config::part_begin(part) == tile) enter(part, buffer);
        }
        take_scales(scales, scale_words, step);
        convert(words[i], scales, scale_words, valid_lanes, nan, destination, to_tile, step, 0);
        if (i == 0) {
          __syncwarp();
          // Not sooner: ptxas waits for all loads where it waits for one.
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int following = 2 * (pair + 1) + j;
            if (pair + 1 == kPairs) {
              load(later[j], places, j);
            } else if (following < kSteps) {
              load(later[j], places, following);
            }
          }
          if (pair == kPairs - 2) {
            next_scales.load(next);
            look_ahead();
          }
          __syncwarp();
        }
#pragma unroll
        for (int item = 1; item < items(step); ++item) {
          convert(words[i], scales, scale_words, valid_lanes, nan, destination, to_tile, step, item);
        }
#pragma unroll
        for (int part = 0; part < Config::kParts; ++part) {
          if (!ends || Config::part_begin(part + 1) != tile + 1) continue;
          if constexpr (kFolds) {
            if (__any_sync(0xffffffffu, odd_lanes != 0 || has_nan(nan))) {
              repair(part, row, odd_lanes, destination, buffer);
            }
            nan = 0;
          }
          // Values are multiplied behind the fences of those who take the scores, which is enough as specified; as
          // CUTLASS does it, who writes fences as well.
          fence_async_shared();
          if (part == kLastPart) tell_valid(buffer.stage(part), valid_lanes);
          storage.full[buffer.stage(part)][part].arrive();
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) words[i] = later[i];
    }
    scales = next_scales;
  }

  // All blocks of this CTA; `state` is where the small-head variant's ring is behind Q.
  __device__ __forceinline__ void run(State state) {
    if (entries.begin >= entries.end) return;
    int32_t slots[2] = {slot_of(entries.begin), slot_of(entries.begin + 1)};
    Row row = row_of(entries.begin, slots[0]);
    Row next = row_of(entries.begin + 1, slots[1]);
    int32_t slot = slot_of(entries.begin + 2);
    Places places = places_of(row);
    Words words[kAhead];
    Scales<Cache> scales;
    if constexpr (!kCopies) {
#pragma unroll
      for (int step = 0; step < kAhead; ++step) load(words[step], places, step);
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
          convert_block(words, places, scales, row, next, valid_lanes, buffer, look_ahead);
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
