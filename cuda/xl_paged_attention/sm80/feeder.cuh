// A warp's way through its tiles, ahead of the arithmetic.
#pragma once

#include "whole_pages.cuh"

namespace cupymla::xl_paged_attention {

// Keeps a warp's ring filled: goes through the tiles of the warp, segment after segment, ahead of the arithmetic.
template <typename Config>
struct Feeder {
  const Parameters& params;
  const Line<Config>& line;
  Walk<Config> walk;
  SegmentSource segment;
  TileSource<Config> next;   // of the tile to copy next
  int32_t tile;
  bool more;
  uint32_t ring;             // shared address of the warp's first stage
  uint32_t existing_of = 0;  // lane s holds the tokens that exist in stage s
  WholePages<Config> pages;

  __device__ __forceinline__ Feeder(const Parameters& params, const Line<Config>& line,
                                    const Walk<Config>& start, uint32_t ring)
      : params(params), line(line), walk(start), segment(params, start.segment), ring(ring), pages(params, ring) {
    tile = walk.segment.first + static_cast<int32_t>(threadIdx.x / 32);
    // Elsewhere `begin_segment` comes behind the load of the first table entry. Large fp8 heads spill then.
    if constexpr (!Config::kAskEarly) {
      if (walk.any()) begin_segment();
    }
    settle();
  }

  // Asks for what the arithmetic will want first of the segment.
  __device__ __forceinline__ void begin_segment() {
    constexpr int kLine = 128;
    const int lane = threadIdx.x % 32;
    const Segment& now = walk.segment;
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
    if (walk.any() && tile >= walk.segment.end) {
      do {
        walk.next(line);
        tile = walk.segment.first + static_cast<int32_t>(threadIdx.x / 32);
      } while (walk.any() && tile >= walk.segment.end);
      segment = SegmentSource(params, walk.segment);
      if (walk.any()) begin_segment();
    }
    more = walk.any();
    if (more) next.prepare(params, segment, walk.segment.count, tile);
  }

  // Waits for the copies of the tile in `stage`.
  __device__ __forceinline__ void wait(int stage) { wait_for_tile(pages, stage); }

  // Starts the copies of the next tile into `stage`, as one group; an empty group where no tile is left.
  __device__ __forceinline__ void feed(int stage) {
    if (more) {
      const uint32_t existing = copy_tile(params, segment, next, pages, existing_of, ring, stage);
      if (static_cast<int>(threadIdx.x % 32) == stage) existing_of = existing;
      // Not before the copies: the new entries would need registers beside those of the old ones, and moves that wait.
      tile += kWarps;
      settle();
    }
    stream_copy_commit();
  }
};

}  // namespace cupymla::xl_paged_attention
