// Tensor copies that Hopper's TMA cannot do: to or for the other CTA of a pair (.cta_group::2), gathers of four rows,
// scatters to four rows. Threads carry them out, from what the host says of the tensor map; the map's own 128 bytes are
// opaque (PTX ISA 9.0, "cp.async.bulk.tensor"; CUDA Driver API, "cuTensorMapEncodeTiled").
#pragma once

#include "tmem.cuh"

namespace cupymla::emulate {

// An issued copy as the queue keeps it. The coordinates of a gather or scatter are a column and four rows; the
// destination of a scatter is where it reads shared memory.
struct Tile {
  uint64_t map;
  uint32_t barrier, mask, destination;
  bool gathers, paired;
  const uint64_t* coordinates;

  __device__ __forceinline__ explicit Tile(const uint64_t* words)
      : map(words[0]), barrier(static_cast<uint32_t>(words[1])), mask(static_cast<uint32_t>(words[2])),
        destination(static_cast<uint32_t>(words[3])), gathers(words[4] & 1), paired(words[4] >> 1 & 1),
        coordinates(words + 5) {}

  __device__ __forceinline__ int64_t at(uint32_t dimension) const {
    return static_cast<int32_t>(static_cast<uint32_t>(coordinates[dimension]));
  }
};

// What the host knows of the map at that address; null when it was told nothing of it.
__device__ __forceinline__ const TileInfo* find_map(uint64_t address) {
  const auto* words = reinterpret_cast<const uint64_t*>(address);
  for (uint32_t i = 0; i < launch().map_count; ++i) {
    const TileInfo& info = launch().maps[i];
    bool same = true;
    for (uint32_t word = 0; word < 16; ++word) same = same && info.key[word] == words[word];
    if (same) return &info;
  }
  return nullptr;
}

__device__ __forceinline__ uint32_t tile_rows(const Tile& tile, const TileInfo& info) {
  if (tile.gathers) return 4;
  uint32_t rows = 1;
  for (uint32_t i = 1; i < info.rank; ++i) rows *= info.box[i];
  return rows;
}

__device__ __forceinline__ uint32_t tile_swizzle(uint32_t address, uint32_t span) {
  return span ? address ^ (((address >> 7) & (span / 16 - 1)) << 4) : address;
}

// Global address of a row's element 0, and whether the row lies in the tensor.
__device__ __forceinline__ bool row_address(const Tile& tile, const TileInfo& info, uint32_t row, uint64_t& address) {
  address = info.pointer;
  if (tile.gathers) {
    const int64_t index = tile.at(1 + row);
    address += index * static_cast<int64_t>(info.strides[0]);
    return index >= 0 && index < static_cast<int64_t>(info.shape[1]);
  }
  bool inside = true;
  uint32_t rest = row;
  for (uint32_t i = 1; i < info.rank; ++i) {
    const int64_t index = tile.at(i) + rest % info.box[i];
    rest /= info.box[i];
    inside = inside && index >= 0 && index < static_cast<int64_t>(info.shape[i]);
    address += index * static_cast<int64_t>(info.strides[i - 1]);
  }
  return inside;
}

__device__ __forceinline__ bool goes_to(const Tile& tile, uint32_t rank) {
  return tile.mask ? tile.mask >> rank & 1 : rank == tile.destination >> 24;
}

// One row of the box, to every CTA that gets the tile, 16 bytes at a time: rows of a box are a multiple of that.
__device__ __forceinline__ void copy_tile_row(const Tile& tile, const TileInfo& info, uint32_t row) {
  uint64_t from;
  const bool inside = row_address(tile, info, row, from);
  const uint32_t bits = info.element_bits, offset = tile.destination & 0xffffffu, row_bytes = info.box[0] * bits / 8;
  const int64_t first = tile.at(0) * bits / 8, end = static_cast<int64_t>(info.shape[0]) * bits / 8;
  const auto* source = reinterpret_cast<const uint8_t*>(from);
  for (uint32_t x = 0; x < row_bytes; x += 16) {
    uint32_t words[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < 16; ++i) {
      const int64_t at = first + x + i;
      const bool here = inside && at >= 0 && at < end;
      words[i / 4] |= (here ? source[at] : info.nan ? 0xffu : 0u) << (i % 4 * 8);
    }
    const uint32_t place = tile_swizzle(offset + row * row_bytes + x, info.swizzle);
    for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
      if (!goes_to(tile, rank)) continue;
      hardware::store_cluster_16(hardware::map_to_rank(place, rank), uint4{words[0], words[1], words[2], words[3]});
    }
  }
}

// The barrier that is told of a CTA's tile: its own, or for a pair the one of the two that the barrier's address names.
__device__ __forceinline__ uint32_t tile_barrier(const Tile& tile, uint32_t rank) {
  const uint32_t named = tile.barrier >> 24;
  const uint32_t target = tile.mask == 0 ? named : tile.paired ? (rank & ~1u) | (named & 1u) : rank;
  return hardware::map_to_rank(tile.barrier & 0xffffffu, target);
}

// Counts the bytes at the barrier of every CTA that got the tile.
__device__ __forceinline__ void complete_tile(const Tile& tile, const TileInfo& info) {
  const uint32_t bytes = tile_rows(tile, info) * info.box[0] * info.element_bits / 8;
  __threadfence();
  hardware::fence_proxy_async();
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (goes_to(tile, rank)) hardware::complete_bytes_in_cluster(tile_barrier(tile, rank), bytes);
  }
}

// Row of a scatter: from shared memory to the tensor, without what lies outside.
__device__ __forceinline__ void scatter_row(const Tile& tile, const TileInfo& info, uint32_t row) {
  uint64_t to;
  if (!row_address(tile, info, row, to)) return;
  const uint32_t bits = info.element_bits, offset = tile.destination & 0xffffffu, row_bytes = info.box[0] * bits / 8;
  const int64_t first = tile.at(0) * bits / 8, end = static_cast<int64_t>(info.shape[0]) * bits / 8;
  auto* target = reinterpret_cast<uint8_t*>(to);
  for (uint32_t x = 0; x < row_bytes; x += 16) {
    const uint32_t place = tile_swizzle(offset + row * row_bytes + x, info.swizzle);
    const uint4 chunk = hardware::load_cluster_16(hardware::map_to_rank(place, tile.destination >> 24));
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    for (uint32_t i = 0; i < 16; ++i) {
      const int64_t at = first + x + i;
      if (at >= 0 && at < end) target[at] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

// The same for the search of what completes a barrier: whether this copy will.
__device__ __forceinline__ bool tile_signals(const Tile& tile, uint32_t barrier) {
  if ((tile.barrier & 0xffffffu) != (barrier & 0xffffffu)) return false;
  if (tile.mask == 0) return tile.barrier == barrier;
  const uint32_t rank = barrier >> 24;
  if (!tile.paired) return tile.mask >> rank & 1;
  return (rank & 1u) == (tile.barrier >> 24 & 1u) && (tile.mask >> (rank & ~1u) & 3u) != 0;
}

}  // namespace cupymla::emulate
