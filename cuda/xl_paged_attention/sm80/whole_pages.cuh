// Copies of whole pages: blocks of 16 tokens of a "vllm" cache, whose keys of one head lie together, and whose values do.
// One lane of a warp starts two copies for each, where a copy of 16 bytes at a time takes an instruction of every lane
// for each 512 bytes, and a place for each in the queue of the SM's memory pipeline.
#pragma once

#include "../../common/bulk_copy.cuh"
#include "copies.cuh"

namespace cupymla::xl_paged_attention {

// A warp's ring, as far as whole pages are concerned. Behind the tile of each stage lies the barrier that its copies
// arrive at; a stage is filled again behind the __syncwarp that follows its last read.
template <typename Config>
struct WholePages {
  static constexpr int kSub = Config::kSub;
  static constexpr uint32_t kKeyBytes = Config::kRowChunks * kSub * 16;
  static constexpr uint32_t kValueBytes = Config::kHeadSize * kSub * Config::kItem;

  const uint32_t ring;
  const bool used;        // else pieces are copied, as in blocks of more tokens
  uint32_t parities = 0;  // of the phases that stages' barriers are in, one bit each
  uint32_t pending = 0;   // stages whose copies nobody has waited for

  // Makes the stages' barriers; clears the chunks past the head, which no page holds.
  __device__ __forceinline__ WholePages(const Parameters& params, uint32_t ring)
      : ring(ring), used(Config::kBulk && params.block_size == kSub) {
    constexpr int kPadding = (Config::kKeyChunks - Config::kRowChunks) * kSub;  // pieces, of a sub-tile
    const int lane = threadIdx.x % 32;
    if constexpr (!Config::kBulk) return;
    if (!used) return;
    if (lane < Config::kStages) {
      filled(lane).init(1);
      fence_mbarrier_init();
    }
#pragma unroll
    for (int part = 0; part < (kPadding > 0 ? Config::kStages * Config::kSubs : 0); ++part) {
      const int first = part % Config::kSubs * Config::kSubStep + Config::kRowChunks * kSub;
      for (int i = lane; i < kPadding; i += 32) *piece(part / Config::kSubs, (first + i) * 16) = uint4{};
    }
    __syncwarp();
  }

  __device__ __forceinline__ Mbarrier& filled(int stage) const {
    return *reinterpret_cast<Mbarrier*>(piece(stage, Config::kTileBytes));
  }

  __device__ __forceinline__ uint4* piece(int stage, int offset) const {
    return reinterpret_cast<uint4*>(__cvta_shared_to_generic(ring + stage * Config::kStageBytes + offset));
  }

  // Copies a tile; returns which tokens exist. Pages come with what lies past the sequence's end: scores of such tokens
  // are hidden, their values cleared. `was_whole`: all tokens of the tile that the stage held before existed.
  __device__ __forceinline__ uint32_t copy(const Parameters& params, const SegmentSource& segment,
                                           const TileSource<Config>& source, int stage, bool was_whole) {
    const int lane = threadIdx.x % 32;
    wait(stage);  // only where lengths have changed under way
    pending |= 1u << stage;
    uint32_t existing = 0, bytes = 0;
#pragma unroll
    for (int sub = 0; sub < Config::kSubs; ++sub) {
      const int tokens = source.exists(params, sub) ? max(0, min(kSub, source.tokens - sub * kSub)) : 0;
      existing |= ((1u << tokens) - 1u) << (sub * kSub);
      if (tokens > 0) {
        bytes += kKeyBytes + kValueBytes;
      } else {
        // Nothing comes; what is there is multiplied all the same.
        clear(stage, sub * Config::kSubStep * 16, kKeyBytes);
        clear(stage, Config::kKeyBytes + sub * Config::kValueSubBytes, kValueBytes);
      }
    }
    // Zeros were written here, or values cleared, when the stage was filled last.
    if (!was_whole) fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      Mbarrier& barrier = filled(stage);
      const uint32_t to = ring + stage * Config::kStageBytes;
      barrier.arrive_and_expect(bytes);
#pragma unroll
      for (int sub = 0; sub < Config::kSubs; ++sub) {
        if (((existing >> (sub * kSub)) & 1u) == 0) continue;
        const int64_t block = source.block[sub];
        bulk_copy(to + sub * Config::kSubStep * 16, segment.keys + block * params.k_block_bytes, kKeyBytes, barrier);
        bulk_copy(to + Config::kKeyBytes + sub * Config::kValueSubBytes, segment.values + block * params.v_block_bytes,
                  kValueBytes, barrier);
      }
    }
    return existing;
  }

  // For the tile in `stage`. Where lengths have changed under way there may be none.
  __device__ __forceinline__ void wait(int stage) {
    const uint32_t bit = 1u << stage;
    if ((pending & bit) == 0) return;
    filled(stage).wait((parities >> stage) & 1u);
    parities ^= bit;
    pending ^= bit;
  }

  // For all copies: none may be under way when the CTA ends.
  __device__ __forceinline__ void drain() {
    if constexpr (Config::kBulk) {
#pragma unroll 1
      for (int stage = 0; pending != 0; ++stage) wait(stage);
    }
  }

 private:
  __device__ __forceinline__ void clear(int stage, int offset, int bytes) const {
    for (int i = threadIdx.x % 32; i < bytes / 16; i += 32) *piece(stage, offset + i * 16) = uint4{};
  }
};

// Starts the copies of a tile into a stage of the warp's ring; returns which tokens exist. `existing_of`: lane s holds
// those of the tile in stage s.
template <typename Config>
__device__ __forceinline__ uint32_t copy_tile(const Parameters& params, const SegmentSource& segment,
                                              const TileSource<Config>& source, WholePages<Config>& pages,
                                              uint32_t existing_of, uint32_t ring, int stage) {
  const uint32_t to = ring + stage * Config::kStageBytes;
  if constexpr (!Config::kPages) {
    return copy_rows<Config>(params, segment, source, to);
  } else if constexpr (Config::kBulk) {
    if (pages.used) {
      const bool was_whole = __shfl_sync(kFullWarp, existing_of, stage) == kFullWarp >> (32 - Config::kTile);
      return pages.copy(params, segment, source, stage, was_whole);
    }
    return copy_pages<Config, false>(params, segment, source, to);
  } else if (params.block_size == Config::kSub) {
    return copy_pages<Config, true>(params, segment, source, to);
  } else {
    return copy_pages<Config, false>(params, segment, source, to);
  }
}

// Waits for a tile's copies: for all of them, or for those of this lane.
template <typename Config>
__device__ __forceinline__ void wait_for_tile(WholePages<Config>& pages, int stage) {
  if constexpr (Config::kBulk) {
    if (pages.used) {
      pages.wait(stage);
      return;
    }
  }
  stream_copy_wait<Config::kStages - 1>();
}

}  // namespace cupymla::xl_paged_attention
