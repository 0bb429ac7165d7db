// Where scales lie, and how the conversion kernels walk over them.
#pragma once

#include "../../common/types.cuh"

namespace cupymla::nvfp4_gemv {

// Byte of scale (row, column) in the 128x4 layout; columns of a block of four are neighbours.
__device__ __forceinline__ int64_t swizzled_scale(int64_t row, int64_t column, int64_t column_blocks) {
  return (row / 128 * column_blocks + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

__device__ __forceinline__ int64_t padded_rows(int64_t rows) { return (rows + 127) / 128 * 128; }

// A place in [batches, rows, columns] by its number.
struct Place {
  int64_t batch, row, column;

  __device__ __forceinline__ Place(int64_t number, int64_t rows, int64_t columns) {
    const int64_t whole_row = number / columns;
    column = number - whole_row * columns;
    batch = whole_row / rows;
    row = whole_row - batch * rows;
  }
};

__device__ __forceinline__ int64_t first_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t number_step() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

}  // namespace cupymla::nvfp4_gemv
