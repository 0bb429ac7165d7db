// The producer warpgroup: brings in Q and the selected rows of both caches as blocks of swizzled tiles, and says which
// entries are valid. Each warp serves sixteen consecutive entries of a block of 64: lane l looks for the row of entry
// l % 16, and in each of four passes eight lanes bring in a tile's 64 channels of one row. shared_producer.cuh has what
// is different where two CTAs share rows.
//
// With many heads, who takes a block's scores orders what is written here with the products, by its own fence of the
// asynchronous proxy, and who takes values of the block waits for P, which comes behind that. A fence here would be one
// more, and ptxas makes it a barrier of all accesses, loads that are on their way included. With few heads the values'
// warpgroup takes no scores, and fences nothing of a block: there the producer does, which costs no time (H200).
#pragma once

#include "../../common/async_copy.cuh"
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
                                             int32_t* entries) {
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
  static constexpr bool kFolds = folds<Cache, Element>();
  // Where consumers convert, half of a row is loaded a block ahead anyway; v4_fp8 takes 3% longer without (H200).
  static constexpr bool kPrefetches = !kCopies && !(Config::kConsumersConvert && Cache::kHas16ByteRows);
  static constexpr int kWarpKeys = 16;  // that a warp looks for
  static constexpr int kOwnKeys = kWarpKeys / Config::kSharers;  // and brings in
  static constexpr int kPasses = kOwnKeys / 4;
  static constexpr int kLastPart = Config::kParts - 1;

  static constexpr uint32_t kCodes = 8;  // of a lane, in each tile and pass

  // A row's bytes that a lane copies at a time.
  static constexpr uint32_t kCopyBytes = Cache::kHas16ByteRows ? 16 : 8;

  // Codes wait in the block's own buffer: those of tiles 2 * i and 2 * i + 1 where tile kCodesFirst + i will be, each
  // warp's in its rows of that. Tiles are written in order, each when the codes of the next one have been read.
  static constexpr int kCodesFirst = Cache::kCodeTiles / 2;
  static constexpr bool codes_are_read_first() {
    for (int tile = kCodesFirst; tile < Cache::kCodeTiles; ++tile) {
      if (2 * (tile - kCodesFirst) + 1 > tile + 1) return false;
    }
    return (Cache::kCodeTiles - 1) / 2 + kCodesFirst < Cache::kCodeTiles;  // bf16 lie behind
  }
  static_assert(Cache::kCodeTiles == 0 || codes_are_read_first());

  // A lane's eight codes of each pass.
  struct Codes {
    uint32_t low[kPasses], high[kPasses];
  };

  Storage& storage;
  const Parameters& params;
  const sparse_mla_fwd::Query query;
  const Entries entries;
  const bool rehearses;  // by other threads, and without entries: see `kRehearses`
  const uint8_t* any_row;
  const int warp = (threadIdx.x / 32) % 4;
  const int lane = threadIdx.x % 32;
  const uint32_t chunk = threadIdx.x % 8;
  const uint32_t sharer = sparse_mla_fwd::WorkAssignment<Config>::sharer();

  __device__ __forceinline__ Producer(Storage& storage, const Parameters& params, const sparse_mla_fwd::Query& query,
                                      const Entries& entries, bool rehearses = false)
      : storage(storage),
        params(params),
        query(query),
        entries(entries),
        rehearses(rehearses),
        any_row(params.sources[entries.counts[0] > 0 ? 0 : 1].cache) {}

  // The first row of a block that this warp brings in, or that the same warp of the CTA `other` places further does.
  __device__ __forceinline__ uint32_t first_key(uint32_t other = 0) const {
    return ((sharer ^ other) * 4 + warp) * kOwnKeys;
  }

  // Whether this lane looks for a row that its own CTA brings in.
  __device__ __forceinline__ bool is_own() const { return lane % kWarpKeys < kOwnKeys; }

  // The slot of this lane's entry of a block, -1 where there is no such entry.
  __device__ __forceinline__ int32_t slot_of(int32_t block) const {
    if (block >= entries.end) return -1;
    const bool is_second = block >= entries.first_blocks;
    const Source& source = params.sources[is_second];
    const int32_t key = static_cast<int32_t>(first_key(is_own() ? 0 : 1)) + lane % kOwnKeys;
    const int32_t entry = (block - (is_second ? entries.first_blocks : 0)) * kTileKeys + key;
    if (entry >= (is_second ? entries.counts[1] : entries.counts[0])) return -1;
    return __ldg(source.indices + query.batch * source.indices_batch + query.query * source.indices_query + entry);
  }

  // And its row, asked for from L2 already where nothing of it is loaded soon.
  __device__ __forceinline__ Row row_of(int32_t block, int32_t slot) const {
    const Row row = find_row<Cache>(params.sources[block >= entries.first_blocks], slot, any_row);
    if (kPrefetches && row.valid && is_own()) prefetch(row);
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

  // Of what a lane has of each row: as many bytes as its neighbours.
  template <uint32_t kLaneBytes = kCopyBytes>
  __device__ __forceinline__ Places places_of(const Row& row) const {
    Places places;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint64_t address = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row.data), entry_of(pass));
      places.data[pass] = reinterpret_cast<const uint8_t*>(address) + chunk * kLaneBytes;
    }
    return places;
  }

  // Of codes that come by registers, as one number: see `load_row_8`.
  static __device__ __forceinline__ uint32_t low_of(uint64_t both) { return static_cast<uint32_t>(both); }
  static __device__ __forceinline__ uint32_t high_of(uint64_t both) { return static_cast<uint32_t>(both >> 32); }

  // The scale of a tile of this part, of a pass's entry, from what its finder loaded.
  __device__ __forceinline__ float scale_of(const Scales<Cache>& scales, int pass, int tile) const {
    const uint32_t word = __shfl_sync(0xffffffffu, scales.of[0], entry_of(pass));
    return Cache::kPowersOfTwo ? power_of_exponent(word >> tile * 8 & 0xffu) : __uint_as_float(word);
  }

  // What multiplies a tile's codes, from what `take_scales` gave.
  static __device__ __forceinline__ auto folded(uint32_t word, int tile) {
    if constexpr (Cache::kPowersOfTwo) {
      return FoldedPower(word, tile);
    } else {
      return FoldedScale(word);
    }
  }

  // Scales of a part's entries.
  __device__ __forceinline__ void take_scales(const Scales<Cache>& scales, uint32_t (&scale_words)[kPasses]) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      scale_words[pass] = __shfl_sync(0xffffffffu, scales.of[0], entry_of(pass));
    }
  }

  // Where this lane's eight codes of a tile wait, of the first pass; those of the next one 256 bytes behind. Neighbours
  // among rows change places in every other tile: a copy of 128 bytes of a row meets each bank once.
  __device__ __forceinline__ uint32_t codes_at(int stage, int tile) const {
    return smem_address(storage.k[stage][kCodesFirst + tile / 2]) + first_key() * 128 + tile % 2 * (kOwnKeys * 64) +
           (lane / 8 ^ tile % 2) * 64 + chunk * 8;
  }

  // And where it copies 16 bytes of two tiles to.
  __device__ __forceinline__ uint32_t pair_at(int stage, int tile) const {
    const uint32_t second = chunk / 4;
    return smem_address(storage.k[stage][kCodesFirst + tile / 2]) + first_key() * 128 + second * (kOwnKeys * 64) +
           (lane / 8 ^ second) * 64 + chunk % 4 * 16;
  }

  // Copies a block's rows into its buffer as they are, once that is free: bf16 to where the products want them. Zeros
  // of what is not valid.
  template <typename Buffer>
  __device__ __forceinline__ void bring(const Places& places, uint32_t valid_lanes, const Buffer& buffer) const {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) enter(part, buffer);
    copy_tiles<0>(places, valid_lanes, buffer.stage(0));
    stream_copy_commit();
  }

  // The same of tiles from a pair on, where there is room.
  template <int kFirst>
  __device__ __forceinline__ void copy_tiles(const Places& places, uint32_t valid_lanes, int stage) const {
    uint32_t destination[2];
    destinations(destination);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t bytes = valid_lanes >> entry_of(pass) & 1u ? kCopyBytes : 0;
#pragma unroll
      for (int tile = kFirst; tile < Cache::kCodeTiles; tile += kCopyBytes / 8) {
        const uint32_t to = kCopyBytes == 16 ? pair_at(stage, tile) : codes_at(stage, tile);
        stream_copy_or_zeros<kCopyBytes>(to + pass * 256, places.data[pass] + tile * 64, bytes);
      }
#pragma unroll
      for (int tile = Cache::kCodeTiles; tile < Cache::kTiles; ++tile) {
        const uint32_t to =
            destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + smem_address(storage.k[stage][tile]);
        const uint8_t* from = places.data[pass] + Cache::kWideBegin + (tile - Cache::kCodeTiles) * 128;
        if constexpr (kCopyBytes == 16) {
          stream_copy_or_zeros<16>(to, from, bytes);
        } else {
          from += chunk * 8;
          stream_copy_or_zeros<8>(to, from, bytes);
          stream_copy_or_zeros<8>(to + 8, from + 8, bytes);
        }
      }
    }
  }

  __device__ __forceinline__ void read(Codes& codes, int stage, int tile, bool live = true) const {
    const uint32_t from = codes_at(stage, tile);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      load_shared_8_if(live, codes.low[pass], codes.high[pass], from + pass * 256);
    }
  }

  // Writes a tile of codes as elements; `tile` is its number in its part, `to_tile` its address, `scale_words` are the
  // scales of the entries that this lane reads of. `nan` gets bits that `has_nan` knows.
  __device__ __forceinline__ void convert(const Codes& codes, const Scales<Cache>& scales,
                                          const uint32_t (&scale_words)[kPasses], uint32_t& nan,
                                          const uint32_t (&destination)[2], uint32_t to_tile, int tile,
                                          bool live = true) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t address = destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile;
      const uint32_t low = codes.low[pass], high = codes.high[pass];
      if constexpr (kFolds) {
        store_shared_16_if(live, address, eight_bf16(folded(scale_words[pass], tile), low, high));
        nan |= nan_bits(low) | nan_bits(high);
      } else {
        store_shared_16_if(live, address, eight_elements<Element>(low, high, scale_of(scales, pass, tile)));
      }
    }
  }

  // The same of a tile of bf16, in its place.
  __device__ __forceinline__ void convert_wide(const uint32_t (&destination)[2], uint32_t to_tile) const {
    if constexpr (!is_same_v<Element, __nv_bfloat16>) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const uint32_t address = destination[pass % 2] + pass / 2 * kSwizzleAtomBytes + to_tile;
        uint32_t own[4];
        load_shared_16(own, address);
        store_shared_16(address, make_uint4(from_bf16<Element>(own[0]), from_bf16<Element>(own[1]),
                                            from_bf16<Element>(own[2]), from_bf16<Element>(own[3])));
      }
    }
  }

  // The row of a pass's entry, from the lane that looked for it. By all lanes.
  struct Found {
    const uint8_t* data;
    const uint8_t* scales;
    bool valid;
  };

  __device__ __forceinline__ Found find(const Row& row, int pass) const {
    const int entry = entry_of(pass);
    Found found;
    found.data = reinterpret_cast<const uint8_t*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row.data), entry));
    found.scales = found.data + __shfl_sync(0xffffffffu, static_cast<long long>(row.scales_at), entry);
    found.valid = __shfl_sync(0xffffffffu, static_cast<int>(row.valid), entry) != 0;
    return found;
  }

  // Eight codes of a valid row's tile as elements, whatever they and the scale are.
  __device__ __forceinline__ uint4 any_elements(const Found& found, uint32_t low, uint32_t high, int tile) const {
    float scale;
    if constexpr (Cache::kPowersOfTwo) {
      scale = power_of_exponent(__ldg(found.scales + tile));
    } else {
      scale = __ldg(reinterpret_cast<const float*>(found.scales) + tile / Cache::kWordTiles);
    }
    return eight_elements<Element>(low, high, scale);
  }

  // Once more the codes of a part's tiles, of rows whose scale does not fold and of eight codes with NaN among them. By
  // all lanes; hardly ever. A lane makes those again that it has made, of `kLaneBytes` codes side by side.
  template <uint32_t kLaneBytes = kCodes, typename Buffer>
  __device__ __forceinline__ void repair(int part, const Row& row, uint32_t odd_lanes,
                                         const Buffer& buffer) const {
#pragma unroll 1
    for (int tile = Config::part_begin(part); tile < min(Config::part_begin(part + 1), Cache::kCodeTiles); ++tile) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int entry = entry_of(pass);
        const Found found = find(row, pass);
        if (!found.valid) continue;
        const uint32_t first = kLaneBytes == 16 ? tile / 2 * 128 + chunk * 16 + tile % 2 * 8 : tile * 64 + chunk * 8;
        uint32_t low, high;
        load_row_8(low, high, found.data + first);
        if ((odd_lanes >> entry & 1u) == 0 && !has_nan(nan_bits(low) | nan_bits(high))) continue;
        store_shared_16(smem_address(storage.k[buffer.stage(0)][0]) + first / 64 * Config::kTileBytes +
                            swizzle_128(first_key() + entry, first / 8 % 8),
                        any_elements(found, low, high, first / 64));
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
    for (int pass = 0; pass < 2; ++pass) destination[pass] = swizzle_128(first_key() + entry_of(pass), chunk);
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

  // The codes of a part's two tiles; `codes` are those of the first one, and become those of the next part's. `scales`
  // are the part's, and become the next one's.
  __device__ __forceinline__ void convert_part(Codes& codes, Scales<Cache>& scales, uint32_t& nan,
                                               const uint32_t (&destination)[2], int stage, int part,
                                               bool live) const {
    const int tile = 2 * part;
    const uint32_t to_tile = smem_address(storage.k[stage][tile]);
    uint32_t scale_words[kPasses];
    if constexpr (kFolds) take_scales(scales, scale_words);
    const bool has_second = Cache::kCodeTiles % 2 == 0 || part != kLastPart;
    Codes second;
    if (has_second) read(second, stage, tile + 1, live);
    __syncwarp();  // all lanes have read what waits where this tile goes
    convert(codes, scales, scale_words, nan, destination, to_tile, 0, live);
    if (has_second) {
      if (part != kLastPart) read(codes, stage, tile + 2, live);
      __syncwarp();
      convert(second, scales, scale_words, nan, destination, to_tile + Config::kTileBytes, 1, live);
    }
    scales.next_part();
  }

  // Parts whose code stands one behind the other. With few heads they are a loop: a CTA that has a block or two waits
  // for instructions more than for anything else. With many, a loop takes 1.13 of the time (H200).
  static constexpr int kUnrolledParts = Config::kSmallHead ? 1 : Config::kParts;

  // A block whose rows have been brought. `amid` is called when two tiles are done.
  template <typename Buffer, typename Amid>
  __device__ __forceinline__ void convert_block(Scales<Cache>& scales, const Row& row, uint32_t valid_lanes,
                                                const Buffer& buffer, Amid&& amid) const {
    const int stage = buffer.stage(0);
    const bool live = is_live();
    uint32_t destination[2];
    destinations(destination);
    uint32_t odd_lanes = 0;
    if constexpr (kFolds) odd_lanes = __ballot_sync(0xffffffffu, !scales.fold());
    stream_copy_wait<0>();
    __syncwarp();
    Codes codes;
    if constexpr (Cache::kCodeTiles > 0) read(codes, stage, 0, live);
#pragma unroll kUnrolledParts
    for (int part = 0; part < Config::kParts; ++part) {
      uint32_t nan = 0;
      if constexpr (Cache::kCodeTiles > 0) {
        convert_part(codes, scales, nan, destination, stage, part, live);
      }
      if (!live) continue;
      if constexpr (!is_same_v<Element, __nv_bfloat16>) {
        for (int tile = max(Config::part_begin(part), Cache::kCodeTiles); tile < Config::part_begin(part + 1); ++tile) {
          convert_wide(destination, smem_address(storage.k[stage][tile]));
        }
      }
      if constexpr (kFolds) {
        if (__any_sync(0xffffffffu, odd_lanes != 0 || has_nan(nan))) repair(part, row, odd_lanes, buffer);
      }
      if (part == kLastPart) tell_valid(stage, valid_lanes);
      if constexpr (Config::kSmallHead) fence_async_shared();
      storage.full[stage][part].arrive();
      if (part == 0) amid();
    }
  }

  // A block's buffer, and the turn of the next.
  __device__ __forceinline__ auto take_buffer(State& state, Phases& phases, int32_t block) const {
    if constexpr (Config::kSmallHead) {
      const State taken = state;
      state.advance();
      return taken;
    } else {
      const uint32_t buffer = (block - entries.begin) % 2;
      const sm90::OneBuffer<Config> taken{static_cast<int>(buffer), phases.free(buffer)};
      phases.advance(buffer);
      return taken;
    }
  }

  // The rows of the first two blocks, and the slot of the third one's: asked for in one piece of code, as the first
  // time through code is waited for.
  struct Ahead {
    Row row, next;
    int32_t slot;
  };

  // Whether a block's code is to have effects: it is no rehearsal. Known when it runs, so that both have the same code.
  __device__ __forceinline__ bool is_live() const {
    if constexpr (!kFolds) return true;
    int32_t end = entries.end;
    make_opaque(end);
    return end > 0;
  }

  // The same where nothing is asked for.
  __device__ __forceinline__ Ahead nothing_ahead() const {
    const Row row = find_row<Cache>(params.sources[0], -1, any_row);
    return {row, row, -1};
  }

  // `load_query` brings in Q while the first slots are on their way, and gives the ring's state behind it.
  template <typename LoadQuery>
  __device__ __forceinline__ Ahead begin_with(const LoadQuery& load_query, State& state) const {
    Ahead ahead;
    ahead.slot = slot_of(entries.begin);
    int32_t later = slot_of(entries.begin + 1);
    state = load_query();
#pragma unroll 1
    for (int32_t block = entries.begin; block < entries.begin + 2; ++block) {
      ahead.row = ahead.next;
      ahead.next = row_of(block, ahead.slot);
      ahead.slot = later;
      later = slot_of(block + 2);
    }
    return ahead;
  }

  // All blocks of this CTA. While a block is converted the next one's rows come. Consumers that own every other block
  // free the first of two when they have scores of both, so the next one's buffer may be waited for amid a block or
  // behind it.
  template <typename LoadQuery>
  __device__ __forceinline__ void run(const LoadQuery& load_query, Phases& phases) {
    State state;
    Ahead ahead = nothing_ahead();
    if (!rehearses) {
      ahead = begin_with(load_query, state);
      if (entries.begin >= entries.end) return;
    }
    Row row = ahead.row, next = ahead.next;
    int32_t slot = ahead.slot;
    if constexpr (kCopies) {
      for (int32_t block = entries.begin; block < entries.end; ++block) {
        const uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
        copy_block(places_of(row), valid_lanes, take_buffer(state, phases, block));
        row = next;
        next = row_of(block + 2, slot);
        slot = slot_of(block + 3);
      }
      return;
    } else {
      auto buffer = take_buffer(state, phases, entries.begin);
      uint32_t valid_lanes = __ballot_sync(0xffffffffu, row.valid);
      if (!rehearses) bring(places_of(row), valid_lanes, buffer);
      Scales<Cache> scales;
      scales.load(row, is_own());
      int32_t block = entries.begin;
#pragma unroll 1
      do {
        const bool more = block + 1 < entries.end;
        const bool early = Config::kSmallHead || (block - entries.begin) % 2 == 0;
        const uint32_t next_valid = __ballot_sync(0xffffffffu, next.valid);
        auto next_buffer = buffer;
        Scales<Cache> next_scales;
        next_scales.load(next, is_own());
        const int32_t later_slot = slot_of(block + 3);
        const auto bring_next = [&] {
          next_buffer = take_buffer(state, phases, block + 1);
          bring(places_of(next), next_valid, next_buffer);
        };
        convert_block(scales, row, valid_lanes, buffer, [&] {
          if (more && early) bring_next();
        });
        if (more && !early) bring_next();
        buffer = next_buffer;
        valid_lanes = next_valid;
        scales = next_scales;
        row = next;
        next = row_of(block + 2, slot);
        slot = later_slot;
      } while (++block < entries.end);
    }
  }
};

}  // namespace cupymla::sparse_mla_decode
