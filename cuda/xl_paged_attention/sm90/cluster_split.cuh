// Who does what where there are few units: a cluster of CTAs, or several, for each unit, and for each CTA an equal part
// of the unit's tiles. Nobody counts a line, nobody looks for a place on it, and no barrier depends on a length: each
// warp reads the length of its sequence and works out its tiles by itself.
#pragma once

#include "../../common/memory.cuh"
#include "../sm80/tensor.cuh"
#include "config.cuh"

namespace cupymla::xl_paged_attention {

// Which unit this CTA works on: what it knows of it without its length.
struct UnitAssignment {
  uint32_t ctas;   // of the unit
  uint32_t index;  // of the unit, in all sequences
  uint32_t cta;    // of this one, in the unit

  explicit __device__ __forceinline__ UnitAssignment(const Parameters& params)
      : ctas(static_cast<uint32_t>(params.large_parts)), index(blockIdx.x / ctas), cta(blockIdx.x - index * ctas) {}
};

// The unit itself.
template <typename Config>
__device__ __forceinline__ Segment unit_of(const Parameters& params, const UnitAssignment& assignment) {
  const uint32_t units = static_cast<uint32_t>(params.num_kv_heads * params.row_blocks);
  Segment segment;
  segment.seq = params.num_seqs == 1 ? 0 : static_cast<int32_t>(assignment.index / units);
  segment.unit = static_cast<int32_t>(assignment.index - segment.seq * units);
  segment.kv_head = params.row_blocks == 1 ? segment.unit : segment.unit / params.row_blocks;
  const int32_t first_row = (segment.unit - segment.kv_head * params.row_blocks) * Config::kRows;
  segment.first_head = segment.kv_head * params.group + first_row;
  segment.rows = min(Config::kRows, params.group - first_row);
  segment.start = 0;
  return segment;
}

// By one warp of a CTA, while the length is on its way: asks for the table entries of the CTA's part if the sequence is
// as long as it can be. More warps would only queue for the same line.
__device__ __forceinline__ void ask_for_table(const Parameters& params, const UnitAssignment& assignment,
                                              const Segment& segment) {
  constexpr int kEntries = 8;  // of 32 bytes
  const int lane = threadIdx.x % 32;
  if (lane >= 4) return;
  const float part = static_cast<float>(assignment.cta) / static_cast<float>(assignment.ctas);
  const int32_t position = static_cast<int32_t>(part * static_cast<float>(params.capacity));
  const int32_t column = position / params.block_size + lane * kEntries;
  if (static_cast<int64_t>(column) * params.block_size < params.capacity) {
    prefetch_l2(params.block_tables + segment.seq * params.tables_seq + column);
  }
}

// This CTA's tiles, once the length is known; by a whole warp.
template <typename Config>
__device__ __forceinline__ void take_tiles(Segment& segment, const UnitAssignment& assignment, int32_t count) {
  segment.count = count;
  segment.tiles = (count + Config::kTile - 1) / Config::kTile;
  const uint32_t tiles = static_cast<uint32_t>(segment.tiles), each = tiles / assignment.ctas;
  const uint32_t more = tiles - each * assignment.ctas;  // CTAs with one more
  segment.first = static_cast<int32_t>(assignment.cta * each + min(assignment.cta, more));
  segment.end = segment.first + static_cast<int32_t>(each + (assignment.cta < more ? 1u : 0u));
}

// Keeps a warp's ring filled with the tiles of the only segment there is.
template <int kHeadSize, typename QueryArg, typename Cache, bool kPages>
struct Feeder<ClusterConfig<kHeadSize, QueryArg, Cache, kPages>> {
  using Config = ClusterConfig<kHeadSize, QueryArg, Cache, kPages>;

  const Parameters& params;
  const Segment& now;
  SegmentSource segment;
  TileSource<Config> next;   // of the tile to copy next
  int32_t tile;
  bool more;
  uint32_t ring;             // shared address of the warp's first stage
  uint32_t existing_of = 0;  // lane s holds the tokens that exist in stage s

  __device__ __forceinline__ Feeder(const Parameters& params, const Line<Config>&, const SegmentIterator<Config>& start,
                                    uint32_t ring)
      : params(params), now(start.segment), segment(params, start.segment), ring(ring) {
    tile = now.first + static_cast<int32_t>(threadIdx.x / 32);
    settle();
    if constexpr (!Config::kAskEarly) begin_segment();
  }

  // Asks for the bias of the warp's first tile, in front of the copies.
  __device__ __forceinline__ void begin_segment() const {
    const int lane = threadIdx.x % 32, row = lane % Config::kRows;
    if (!more || row >= now.rows || params.bias == nullptr) return;
    const BiasRow<QueryArg> bias(params, now.seq, now.first_head + row);
    bias.prefetch(params, tile * Config::kTile + (lane < Config::kRows ? 0 : Config::kTile - 1), now.count);
  }

  __device__ __forceinline__ void settle() {
    more = tile < now.end;
    if (more) next.prepare(params, segment, now.count, tile);
  }

  // Starts the copies of the next tile into `stage`, as one group; an empty group where no tile is left.
  __device__ __forceinline__ void feed(int stage) {
    if (more) {
      const uint32_t existing = copy_tile<Config>(params, segment, next, ring + stage * Config::kStageBytes);
      if (static_cast<int>(threadIdx.x % 32) == stage) existing_of = existing;
      tile += kWarps;
      settle();
    }
    stream_copy_commit();
  }
};

}  // namespace cupymla::xl_paged_attention
