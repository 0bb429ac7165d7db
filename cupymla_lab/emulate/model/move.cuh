// tcgen05.cp and tcgen05.shift (PTX ISA 9.0, "tcgen05.cp", "tcgen05.shift").
#pragma once

#include "mma.cuh"

namespace cupymla::emulate {

// An issued tcgen05.cp as the queue keeps it; `format` 1 unpacks 6-bit and 2 unpacks 4-bit elements to bytes.
enum CopyShape : uint32_t { k128x256b = 0, k4x256b = 1, k128x128b = 2, k64x128b = 3, k32x128b = 4 };
enum CopySpread : uint32_t { kNoSpread = 0, kPairs02And13 = 1, kPairs01And23 = 2, kAllFour = 3 };

struct TmemCopy {
  uint64_t descriptor;
  uint32_t address, shape, spread, format, cta_group;

  __device__ __forceinline__ explicit TmemCopy(const uint64_t* words)
      : descriptor(words[0]), address(static_cast<uint32_t>(words[1])), shape(words[2] & 7), spread(words[2] >> 3 & 3),
        format(words[2] >> 5 & 3), cta_group(words[2] >> 7 & 3) {}

  __device__ __forceinline__ uint32_t rows() const {
    return shape == k4x256b ? 4 : shape == k64x128b ? 64 : shape == k32x128b ? 32 : 128;
  }
  __device__ __forceinline__ uint32_t columns() const { return shape == k128x256b || shape == k4x256b ? 8 : 4; }
};

// 16 bytes of elements that are padded in shared memory, as 16 bytes of elements that fill a byte each.
__device__ __forceinline__ uint4 unpacked(const uint4& chunk, uint32_t format) {
  if (format == 0) return chunk;
  const uint64_t low = static_cast<uint64_t>(chunk.y) << 32 | chunk.x, high = chunk.z;
  uint32_t out[4] = {0, 0, 0, 0};
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t at = i * (format == 1 ? 6 : 4);
    uint64_t word = at < 64 ? low >> at : high >> (at - 64);
    if (at < 64 && at + 6 > 64) word |= high << (64 - at);
    const uint32_t byte = format == 1 ? word & 0x3f : (word & 0xf) << 2;
    out[i / 4] |= byte << (i % 4 * 8);
  }
  return uint4{out[0], out[1], out[2], out[3]};
}

__device__ __forceinline__ void write_four(Cta& cta, uint32_t lane, uint32_t column, const uint4& words) {
  write_tmem(cta, lane, column, words.x);
  write_tmem(cta, lane, column + 1, words.y);
  write_tmem(cta, lane, column + 2, words.z);
  write_tmem(cta, lane, column + 3, words.w);
}

// One row, in the shared memory and to the Tensor Memory of one CTA.
__device__ __forceinline__ void copy_row(const TmemCopy& copy, uint32_t rank, uint32_t row,
                                         const Operation& operation) {
  Matrix matrix;
  decode_matrix(copy.descriptor, false, matrix);
  Cta& cta = cta_of(rank);
  const uint32_t lane = lane_of(copy.address), column = column_of(copy.address);
  for (uint32_t part = 0; part < copy.columns() / 4; ++part) {
    const uint32_t address = k_major_address(matrix, row, part * 16) & 0x3fff0u;
    require_proxy_fence(rank, address, operation.thread, operation.site);
    const uint4 chunk = unpacked(hardware::load_cluster_16(hardware::map_to_rank(address, rank)), copy.format);
    const uint32_t at = column + part * 4;
    if (copy.shape == k4x256b) {
      write_four(cta, lane + row * 32, at, chunk);
    } else if (copy.spread == kAllFour) {
      for (uint32_t quarter = 0; quarter < 4; ++quarter) write_four(cta, quarter * 32 + row, at, chunk);
    } else if (copy.spread == kPairs02And13) {
      write_four(cta, row, at, chunk);
      write_four(cta, row + 64, at, chunk);
    } else if (copy.spread == kPairs01And23) {
      write_four(cta, row / 32 * 64 + row % 32, at, chunk);
      write_four(cta, row / 32 * 64 + 32 + row % 32, at, chunk);
    } else {
      write_four(cta, lane + row, at, chunk);
    }
  }
}

// Rows of 32 bytes move down by one in the 32 lanes that begin at the address's; the last one stays.
__device__ __forceinline__ void shift_down(uint32_t address, uint32_t rank) {
  Cta& cta = cta_of(rank);
  const uint32_t lane = lane_of(address), column = column_of(address);
  for (uint32_t row = 0; row < 31; ++row) {
    for (uint32_t i = 0; i < 8; ++i) {
      write_tmem(cta, lane + row, column + i, read_tmem(cta, lane + row + 1, column + i));
    }
  }
}

}  // namespace cupymla::emulate
