// Bringing tiles of keys and values into a warp's ring.
//
// A tile is prepared one step before it is copied, because its block-table entries take a memory access of their own.
// Behind the copies that are under way that would be long: what is read otherwise, table, query and bias, is asked into
// L2 well before.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/async_copy.cuh"
#include "bias.cuh"
#include "schedule.cuh"
#include "storage.cuh"

namespace cupymla::xl_paged_attention {

// Where the keys and values of a segment are, for one KV head.
struct SegmentSource {
  const int32_t* table;  // the sequence's blocks
  const uint8_t* keys;
  const uint8_t* values;

  __device__ __forceinline__ SegmentSource(const Parameters& params, const Segment& segment) {
    const int32_t kv_head = segment.kv_head;
    table = params.block_tables + segment.seq * params.tables_seq;
    keys = params.k_cache + kv_head * params.k_head_bytes;
    values = params.v_cache + kv_head * params.v_head_bytes;
  }
};

// Where a tile's tokens are. In pages every lane knows all sub-tiles; in rows lane l knows token l.
template <typename Config>
struct TileSource {
  static constexpr int kEntries = Config::kPages ? Config::kSubs : 1;
  int32_t tokens;            // keys of the sequence from the tile's first token on
  int32_t block[kEntries];   // whatever the table holds; -1 where the sequence has no token
  int32_t inside[kEntries];  // first token in the block

  __device__ __forceinline__ void prepare(const Parameters& params, const SegmentSource& segment, int32_t count,
                                          int32_t tile) {
    constexpr int kLine = 32;  // entries
    tokens = count - tile * Config::kTile;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int token = Config::kPages ? i * Config::kSub : static_cast<int>(threadIdx.x % 32);
      const uint32_t position = static_cast<uint32_t>(tile * Config::kTile + token);
      uint32_t column;
      if (params.block_shift >= 0) {
        column = position >> params.block_shift;
      } else {
        column = position / static_cast<uint32_t>(params.block_size);
      }
      inside[i] = static_cast<int32_t>(position - column * static_cast<uint32_t>(params.block_size));
      block[i] = token < min(tokens, Config::kTile) ? __ldg(segment.table + column) : -1;
      if (i == 0 && tokens - token > kLine * params.block_size) prefetch_l2(segment.table + column + kLine);
    }
  }

  __device__ __forceinline__ bool exists(const Parameters& params, int i) const {
    return static_cast<uint32_t>(block[i]) < static_cast<uint32_t>(params.num_blocks);
  }
};

// Copies a tile of a "vllm" cache; returns which tokens exist, one bit each. With kSmallBlock the block size is 16, so
// that every step from copy to copy is known when this is compiled.
//
// In shared memory, keys: [chunk of channels][token] of 16 bytes, values: [sub-tile][channel] of 16 tokens. For 16-bit
// elements the two chunks of a channel's 16 tokens change places in every other group of four channels, for fp8 keys
// tokens 8-15 change places in pairs: the eight rows of each matrix that `ldmatrix` reads lie in different banks.
template <typename Config, bool kSmallBlock>
__device__ __forceinline__ uint32_t copy_pages(const Parameters& params, const SegmentSource& segment,
                                               const TileSource<Config>& source, uint32_t stage) {
  constexpr int kSub = Config::kSub;
  constexpr int kValueChunks = kSub * Config::kItem / 16;  // 16-byte chunks of a channel's 16 tokens
  constexpr int kPassChannels = 32 / kValueChunks;
  const int lane = threadIdx.x % 32;
  const int token = lane % kSub;
  const int half = lane / kSub;
  const int value_chunk = lane % kValueChunks;
  const int channel = lane / kValueChunks;
  const int64_t block_size = kSmallBlock ? kSub : params.block_size;
  const int64_t key_step = 2 * 16 * block_size;
  const int64_t channel_step = Config::kItem * block_size;
  uint32_t existing = 0;
#pragma unroll
  for (int sub = 0; sub < Config::kSubs; ++sub) {
    const bool block_exists = source.exists(params, sub);
    const int64_t block = block_exists ? source.block[sub] : 0;
    const int64_t inside = kSmallBlock ? 0 : source.inside[sub];
    const int tokens = block_exists ? max(0, min(kSub, source.tokens - sub * kSub)) : 0;
    existing |= ((1u << tokens) - 1u) << (sub * kSub);

    const bool take_key = token < tokens;
    const uint8_t* key = segment.keys + block * params.k_block_bytes + (inside + token) * 16 + half * (key_step / 2);
    const int key_place = Config::kFp8 ? token ^ ((token >> 2) & 2) : token;
    const uint32_t key_to = stage + (half * Config::kTile + sub * kSub + key_place) * 16;
#pragma unroll
    for (int pair = 0; pair < divide_up(Config::kPaddedChunks, 2); ++pair) {
      const bool inside_head = Config::kRowChunks % 2 == 0 || 2 * pair + half < Config::kRowChunks;
      const uint32_t bytes = take_key && inside_head ? 16u : 0u;
      stream_copy_or_zeros<16>(key_to + pair * 2 * Config::kTile * 16, key + pair * key_step, bytes);
    }

    const bool take_value = value_chunk * Config::kChunk < tokens;
    const uint8_t* value = segment.values + block * params.v_block_bytes + channel * channel_step +
                           inside * Config::kItem + value_chunk * 16;
    const int value_place = kValueChunks == 2 ? value_chunk ^ ((channel >> 2) & 1) : value_chunk;
    const uint32_t value_to = stage + Config::kKeyBytes + sub * Config::kValueSubBytes +
                              (channel * kValueChunks + value_place) * 16;
#pragma unroll
    for (int pass = 0; pass < divide_up(Config::kHeadSize, kPassChannels); ++pass) {
      if (Config::kHeadSize % kPassChannels == 0 || pass * kPassChannels + channel < Config::kHeadSize) {
        const uint32_t bytes = take_value ? 16u : 0u;
        stream_copy_or_zeros<16>(value_to + pass * 512, value + pass * kPassChannels * channel_step, bytes);
      }
    }
  }
  return existing;
}

// An address that another lane holds. Whole addresses, as bases to add to would take registers through all of a tile.
__device__ __forceinline__ const uint8_t* from_lane(const uint8_t* pointer, int lane) {
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(pointer), lane));
}

// Copies a tile of a cache whose tokens are rows of contiguous channels, one row of kPitch bytes for each token;
// returns which tokens exist. What does not exist, and channels past the head, become zero.
template <typename Config>
__device__ __forceinline__ uint32_t copy_rows(const Parameters& params, const SegmentSource& segment,
                                              const TileSource<Config>& source, uint32_t stage) {
  constexpr bool kHalves = Config::kFp8 && Config::kHeadSize % 16 != 0;  // rows are aligned to 8 bytes only
  constexpr int kUnitBytes = kHalves ? 8 : 16;
  constexpr int kUnits = Config::kPaddedChunks * 16 / kUnitBytes;
  constexpr int kRowUnits = Config::kHeadSize * Config::kItem / kUnitBytes;
  const int lane = threadIdx.x % 32;
  const bool exists = source.exists(params, 0);
  const uint32_t existing = __ballot_sync(kFullWarp, exists);
  const int64_t block = exists ? source.block[0] : 0;
  const int64_t inside = exists ? source.inside[0] : 0;
  const uint8_t* const k_row = segment.keys + block * params.k_block_bytes + inside * params.k_token_bytes;
  const uint8_t* const v_row = segment.values + block * params.v_block_bytes + inside * params.v_token_bytes;
#pragma unroll
  for (int pass = 0; pass < divide_up(Config::kTile * kUnits, 32); ++pass) {
    // The last pass may be half a warp's; its other half only lends its rows.
    const bool used = Config::kTile * kUnits % 32 == 0 || pass * 32 + lane < Config::kTile * kUnits;
    const int index = used ? pass * 32 + lane : 0;
    const int token = index / kUnits;
    const int unit = index % kUnits;
    const bool take = ((existing >> token) & 1u) != 0 && unit < kRowUnits;
    const uint32_t to = stage + token * Config::kPitch + unit * kUnitBytes;
    const int64_t offset = take ? unit * kUnitBytes : 0;
    const uint8_t* key = from_lane(k_row, token) + offset;
    const uint8_t* value = from_lane(v_row, token) + offset;
    const uint32_t bytes = take ? kUnitBytes : 0u;
    if (!used) continue;
    stream_copy_or_zeros<kUnitBytes>(to, key, bytes);
    stream_copy_or_zeros<kUnitBytes>(to + Config::kKeyBytes, value, bytes);
  }
  return existing;
}

// Copies a tile into a stage; returns which tokens exist, one bit each.
template <typename Config>
__device__ __forceinline__ uint32_t copy_tile(const Parameters& params, const SegmentSource& segment,
                                              const TileSource<Config>& source, uint32_t stage) {
  if constexpr (!Config::kPages) {
    return copy_rows<Config>(params, segment, source, stage);
  } else if (params.block_size == Config::kSub) {
    return copy_pages<Config, true>(params, segment, source, stage);
  } else {
    return copy_pages<Config, false>(params, segment, source, stage);
  }
}

// Keeps a warp's ring filled: goes through the tiles of the warp, segment after segment, ahead of the arithmetic.
template <typename Config>
struct Feeder {
  const Parameters& params;
  const Line<Config>& line;
  SegmentIterator<Config> iterator;
  SegmentSource segment;
  TileSource<Config> next;   // of the tile to copy next
  int32_t tile;
  bool more;
  uint32_t ring;             // shared address of the warp's first stage
  uint32_t existing_of = 0;  // lane s holds the tokens that exist in stage s

  __device__ __forceinline__ Feeder(const Parameters& params, const Line<Config>& line,
                                    const SegmentIterator<Config>& start, uint32_t ring)
      : params(params), line(line), iterator(start), segment(params, start.segment), ring(ring) {
    tile = iterator.segment.first + static_cast<int32_t>(threadIdx.x / 32);
    // Elsewhere `begin_segment` comes behind the load of the first table entry. Large fp8 heads spill then.
    if constexpr (!Config::kAskEarly) {
      if (iterator.any()) begin_segment();
    }
    settle();
  }

  // Asks for what the arithmetic will want first of the segment.
  __device__ __forceinline__ void begin_segment() {
    constexpr int kLine = 128;
    const int lane = threadIdx.x % 32;
    const Segment& now = iterator.segment;
    const int32_t row = lane % Config::kRows;
    if (row >= now.rows) return;
    const int32_t head = now.first_head + row;
    const uint8_t* const query = params.query + now.seq * params.query_seq_bytes + head * params.query_head_bytes;
    const uint8_t* const offsets = params.pos_bias_u + head * params.u_head_bytes;
    for (int byte = lane / Config::kRows * kLine; byte < Config::kHeadSize * 4; byte += 32 / Config::kRows * kLine) {
      if (byte < Config::kHeadSize * 2) prefetch_l2(query + byte);
      if (params.pos_bias_u != nullptr && byte < Config::kHeadSize << (1 + params.u_wide)) prefetch_l2(offsets + byte);
    }
    if (params.bias != nullptr) {
      const BiasRow<typename Config::Query> bias(params, now.seq, now.first_head + row);
      bias.prefetch(params, tile * Config::kTile + (lane < Config::kRows ? 0 : Config::kTile - 1), now.count);
    }
  }

  // Moves on to the segment that holds this warp's next tile, and asks for its block-table entries.
  __device__ __forceinline__ void settle() {
    if (iterator.any() && tile >= iterator.segment.end) {
      do {
        iterator.next(line);
        tile = iterator.segment.first + static_cast<int32_t>(threadIdx.x / 32);
      } while (iterator.any() && tile >= iterator.segment.end);
      segment = SegmentSource(params, iterator.segment);
      if (iterator.any()) begin_segment();
    }
    more = iterator.any();
    if (more) next.prepare(params, segment, iterator.segment.count, tile);
  }

  // Starts the copies of the next tile into `stage`, as one group; an empty group where no tile is left.
  __device__ __forceinline__ void feed(int stage) {
    if (more) {
      const uint32_t existing = copy_tile<Config>(params, segment, next, ring + stage * Config::kStageBytes);
      if (static_cast<int>(threadIdx.x % 32) == stage) existing_of = existing;
      // Not before the copies: the new entries would need registers beside those of the old ones, and moves that wait.
      tile += kWarps;
      settle();
    }
    stream_copy_commit();
  }
};

}  // namespace cupymla::xl_paged_attention
