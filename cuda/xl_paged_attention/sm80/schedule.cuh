// Who does what. The work is a line: sequence after sequence, in each sequence unit after unit (a unit is a block of
// query heads that share a KV head), in each unit tile after tile of its keys. Every CTA takes an equal part of the
// line, so that ragged batches are balanced to one tile; where all sequences have as many tiles, of as many CTAs as
// let parts end where units do. SMs do not read equally fast, though, so where sequences differ, of long work the CTAs
// past those that are resident at once take small parts: the GPU hands them to SMs that are done with their large
// ones. Which part is whose stays a matter of the CTA's number and of the lengths, and so do the result's bits. A part
// holds the end of a unit that an earlier CTA began, whole units, and the beginning of one that a later CTA will end.
// Lengths are on the device, so each CTA works this out for itself: one of its warps, so that all meet at the same
// barriers even if lengths change while the kernel runs. Then the numbers are anything, but nothing waits for ever and
// no address leaves its array.
#pragma once

#include "../../common/memory.cuh"
#include "../../common/warp.cuh"
#include "params.cuh"

namespace cupymla::xl_paged_attention {

constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ __forceinline__ int32_t key_count(const Parameters& params, int32_t seq) {
  return max(0, min(params.context_lens[seq * params.lens_seq], params.capacity));
}

// Tiles [first, end) of one unit.
struct Segment {
  int32_t seq, unit;
  int32_t kv_head, first_head, rows;  // of the unit: its KV head, its query heads
  int32_t count;       // keys of the sequence
  int32_t tiles;       // tiles of the unit, of which this segment holds [first, end)
  int32_t first, end;
  int64_t start;       // place on the line of the unit's first tile

  __device__ __forceinline__ bool whole() const { return first == 0 && end == tiles; }
};

// How the parts of a unit that several CTAs share are put together: all at once, or first in groups.
struct Spread {
  uint32_t first_cta;    // whose part is the first
  bool begins_with_it;   // it is the first segment of that CTA
  int32_t parts;
  int32_t group;         // parts of a group; as many as there are parts where all are put together at once
  int32_t first;         // part of this CTA's group
  int32_t groups;
};

// What a warp has counted of the line; lane l knows of sequence l.
struct Counted {
  int32_t keys;    // of the sequence
  uint32_t tiles;  // of one unit each of this sequence and all before it
  int64_t total;   // of all
  bool even;       // whether all sequences have as many
};

constexpr uint32_t kLargePart = 6;  // small parts that are as long as a large one (mirrored: `_LARGE_PART` in plan.py)

// Shares of the line, of which each small part is one.
__device__ __forceinline__ uint32_t small_parts_before(uint32_t cta, uint32_t large) {
  return cta + (kLargePart - 1) * min(cta, large);
}

template <typename Config>
struct Line {
  static constexpr int kTile = Config::kTile;
  const Parameters& params;
  const int32_t units;
  const int64_t total;  // tiles of all
  uint32_t large;       // CTAs with a part of several shares: none where all parts are equal
  uint32_t ctas;        // that have a part: with fewer tiles than CTAs the last ones have none
  uint32_t small_parts;  // of them all; not more than tiles, so that no part of theirs is empty

  __device__ __forceinline__ Line(const Parameters& params, int64_t total, bool even)
      : params(params), units(params.num_kv_heads * params.row_blocks), total(total) {
    large = params.large_parts;
    ctas = gridDim.x;
    small_parts = small_parts_before(ctas, large);
    if (even || large == ctas || total < max(params.long_tiles, static_cast<int64_t>(small_parts))) {
      const int32_t equal = even ? params.even_parts : params.large_parts;
      small_parts = ctas = static_cast<uint32_t>(min(static_cast<int64_t>(equal), total));
      large = 0;
    }
  }

  // By a warp. A sequence has less than 2^27 tiles, so those of 32 are counted in 32 bits.
  static __device__ __forceinline__ Counted count(const Parameters& params) {
    const int lane = threadIdx.x % 32;
    Counted counted;
    counted.keys = keys_of(params, 0);
    const int32_t own = tiles_of(counted.keys), first = __shfl_sync(kFullWarp, own, 0);
    bool even = lane >= params.num_seqs || own == first;
    counted.tiles = warp_scan(own, lane);
    int64_t tiles = __shfl_sync(kFullWarp, counted.tiles, 31);
    for (int32_t base = 32; base < params.num_seqs; base += 32) {
      const int32_t more = tiles_of(keys_of(params, base));
      even = even && (base + lane >= params.num_seqs || more == first);
      tiles += __shfl_sync(kFullWarp, warp_scan(more, lane), 31);
    }
    counted.total = tiles * (params.num_kv_heads * params.row_blocks);
    counted.even = __all_sync(kFullWarp, even);
    return counted;
  }

  // Of sequence base + lane; 0 past the last.
  static __device__ __forceinline__ int32_t keys_of(const Parameters& params, int32_t base) {
    const int32_t seq = base + static_cast<int32_t>(threadIdx.x % 32);
    return seq < params.num_seqs ? key_count(params, seq) : 0;
  }

  static __device__ __forceinline__ int32_t tiles_of(int32_t count) { return (count + kTile - 1) / kTile; }

  // Where the part of a CTA begins; that of the next one begins where it ends.
  __device__ __forceinline__ int64_t part(uint32_t cta) const {
    if (cta >= ctas) return total;
    // 64-bit division takes a hundred instructions, which a short call would notice.
    const uint32_t before = small_parts_before(cta, large);
    if (total * small_parts <= 0xffffffffll) return static_cast<uint32_t>(total) * before / small_parts;
    return total / small_parts * before + total % small_parts * before / small_parts;
  }

  // The CTA whose part holds a place on the line.
  __device__ __forceinline__ uint32_t owner(int64_t place) const {
    // A first guess in floating point, put right by at most a few steps.
    const float guess = static_cast<float>(place) / static_cast<float>(total) * static_cast<float>(small_parts);
    const uint32_t small_part = static_cast<uint32_t>(guess);
    uint32_t cta = min(small_part < kLargePart * large ? small_part / kLargePart
                                                       : small_part - (kLargePart - 1) * large,
                       ctas - 1);
    while (part(cta) > place) --cta;
    while (cta + 1 < ctas && part(cta + 1) <= place) ++cta;
    return cta;
  }
};

// Goes through the segments of one CTA's part.
template <typename Config>
struct SegmentIterator {
  int64_t left;  // tiles of the part from `segment` on
  Segment segment;

  __device__ __forceinline__ bool any() const { return left > 0; }

  // A whole warp.
  __device__ __forceinline__ void begin(const Line<Config>& line, const Counted& counted) {
    const int64_t place = line.part(blockIdx.x);
    left = line.part(blockIdx.x + 1) - place;
    segment = {};
    if (left > 0) locate(line, counted, place);
  }

  // A whole warp, so that all of its lanes go by the length that one has read.
  __device__ __forceinline__ void next(const Line<Config>& line) {
    left -= segment.end - segment.first;
    if (left <= 0) return;
    segment.start += segment.tiles;
    int32_t unit = segment.unit + 1;
    if (unit == line.units) {
      unit = 0;
      do {
        if (++segment.seq >= line.params.num_seqs) {
          left = 0;  // sequences became shorter after the line was measured
          return;
        }
        segment.count = __shfl_sync(kFullWarp, key_count(line.params, segment.seq), 0);
        segment.tiles = line.tiles_of(segment.count);
      } while (segment.tiles == 0);
    }
    take_unit(line.params, unit);
    segment.first = 0;
    segment.end = static_cast<int32_t>(min(static_cast<int64_t>(segment.tiles), left));
  }

 private:
  __device__ __forceinline__ void take_unit(const Parameters& params, int32_t unit) {
    segment.unit = unit;
    segment.kv_head = params.row_blocks == 1 ? unit : unit / params.row_blocks;
    const int32_t first_row = (unit - segment.kv_head * params.row_blocks) * Config::kRows;
    segment.first_head = segment.kv_head * params.group + first_row;
    segment.rows = min(Config::kRows, params.group - first_row);
  }

  // The segment at a place that lies on the line.
  __device__ __forceinline__ void locate(const Line<Config>& line, const Counted& counted, int64_t place) {
    int64_t before = 0;
    bool found = false;
    for (int32_t base = 0; base < line.params.num_seqs && !found; base += 32) {
      const int32_t keys = base == 0 ? counted.keys : line.keys_of(line.params, base);
      const uint32_t tiles = base == 0 ? counted.tiles : warp_scan(line.tiles_of(keys), threadIdx.x % 32);
      const uint32_t past = __ballot_sync(kFullWarp, before + static_cast<int64_t>(tiles) * line.units > place);
      found = past != 0;
      const int first = found ? __ffs(static_cast<int>(past)) - 1 : 31;
      const uint32_t passed = __shfl_sync(kFullWarp, found ? tiles - line.tiles_of(keys) : tiles, first);
      before += static_cast<int64_t>(passed) * line.units;
      segment.seq = base + first;
      segment.count = __shfl_sync(kFullWarp, keys, first);
    }
    if (!found) {
      left = 0;  // as in `next`
      return;
    }
    segment.tiles = line.tiles_of(segment.count);
    const int64_t inside = place - before;
    take_unit(line.params, static_cast<int32_t>(inside <= 0xffffffffll ? static_cast<uint32_t>(inside) / segment.tiles
                                                                       : inside / segment.tiles));
    segment.first = static_cast<int32_t>(inside - static_cast<int64_t>(segment.unit) * segment.tiles);
    segment.start = place - segment.first;
    segment.end = static_cast<int32_t>(min(static_cast<int64_t>(segment.tiles), segment.first + left));
  }
};

// Asks for the block-table entries that this CTA needs first if all sequences are as long as they can be: while the
// lengths are on their way, nothing else is. A wrong guess is right for another CTA. By a warp that does not wait for
// the lengths.
__device__ __forceinline__ void prefetch_tables(const Parameters& params) {
  constexpr int kEntries = 8;  // of 32 bytes
  const int lines = threadIdx.x % 32;
  if (lines >= 4 || params.num_seqs == 0 || params.capacity == 0) return;
  const int32_t units = params.num_kv_heads * params.row_blocks;
  if (blockIdx.x >= static_cast<uint32_t>(params.even_parts)) return;
  const float place = static_cast<float>(blockIdx.x) / static_cast<float>(params.even_parts) * params.num_seqs;
  const int32_t seq = min(static_cast<int32_t>(place), params.num_seqs - 1);
  const float unit = (place - seq) * units;
  const int32_t columns = (params.capacity - 1) / params.block_size + 1;
  const int32_t column = static_cast<int32_t>((unit - floorf(unit)) * columns) + lines * kEntries;
  if (column < columns) prefetch_l2(params.block_tables + seq * params.tables_seq + column);
}

}  // namespace cupymla::xl_paged_attention
