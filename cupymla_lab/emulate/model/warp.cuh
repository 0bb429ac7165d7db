// ldmatrix and stmatrix of 8-bit elements, which sm_90 does not have, by a whole warp (PTX ISA 9.0, "ldmatrix",
// "stmatrix").
#pragma once

#include "byte_matrix.cuh"
#include "races.cuh"
#include "state.cuh"

namespace cupymla::emulate {

// A form as the translator encodes it: log2 of the number of matrices in bits 0-1, .m16n16 in bit 2, the bits of an
// element in shared memory in bits 4-7.
struct MatrixForm {
  uint32_t count, element_bits;
  bool tall;
  __device__ __forceinline__ explicit MatrixForm(uint32_t word)
      : count(1u << (word & 3)), element_bits(word >> 4 & 15), tall(word >> 2 & 1) {}
};

// Element `index` of a row of 16 bytes: 4- and 6-bit ones are packed at its front.
__device__ __forceinline__ uint32_t row_element(const uint4& row, uint32_t index, uint32_t bits) {
  const uint64_t low = static_cast<uint64_t>(row.y) << 32 | row.x, high = static_cast<uint64_t>(row.w) << 32 | row.z;
  const uint32_t at = index * bits;
  uint64_t word = at < 64 ? low >> at : high >> (at - 64);
  if (at < 64 && at + bits > 64) word |= high << (64 - at);
  return static_cast<uint32_t>(word) & ((1u << bits) - 1u);
}

// `address` is this lane's; the first lanes name the rows of the first matrix, the next ones those of the next.
__device__ __forceinline__ void load_byte_matrices(uint32_t* out, uint32_t address, uint32_t word) {
  const MatrixForm form(word);
  const uint32_t lane = hardware::lane_index(), rank = hardware::cluster_rank(), registers = form.tall ? 2 : 1;
  __syncwarp();
  for (uint32_t matrix = 0; matrix < form.count; ++matrix) {
    for (uint32_t half = 0; half < registers; ++half) {
      uint32_t bytes = 0;
      for (uint32_t i = 0; i < 4; ++i) {
        const MatrixByte place = loaded_byte(form.tall, lane, half, i);
        const uint32_t row = __shfl_sync(0xffffffffu, address, matrix * 8 * registers + place.row);
        races::read(hardware::map_to_rank(row & 0xffffffu, rank), 16);
        const uint4 chunk = hardware::load_cluster_16(hardware::map_to_rank(row & 0xffffffu, rank));
        bytes |= row_element(chunk, place.byte, form.element_bits) << (8 * i);
      }
      out[matrix * registers + half] = bytes;
    }
  }
  __syncwarp();
}

// Every row is put together by the lane that has its address. Returns whether this lane has one.
__device__ __forceinline__ bool store_byte_matrices(const uint32_t* in, uint32_t address, uint32_t word) {
  const MatrixForm form(word);
  const uint32_t lane = hardware::lane_index();
  uint32_t words[4] = {0, 0, 0, 0};
  __syncwarp();
  for (uint32_t matrix = 0; matrix < form.count; ++matrix) {
    for (uint32_t from = 0; from < 32; ++from) {
      const uint32_t given = __shfl_sync(0xffffffffu, in[matrix], from);
      for (uint32_t i = 0; i < 4; ++i) {
        const MatrixByte place = stored_byte(from, i);
        if (matrix * 8 + place.row != lane) continue;
        words[place.byte / 4] |= (given >> (8 * i) & 0xffu) << (place.byte % 4 * 8);
      }
    }
  }
  const bool mine = lane < form.count * 8;
  const uint32_t target = hardware::map_to_rank(address & 0xffffffu, hardware::cluster_rank());
  if (mine) races::write(target, 16);
  if (mine) hardware::store_cluster_16(target, uint4{words[0], words[1], words[2], words[3]});
  __syncwarp();
  return mine;
}

}  // namespace cupymla::emulate
