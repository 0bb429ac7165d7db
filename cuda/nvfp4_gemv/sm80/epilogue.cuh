// From the warps' sums to c.
#pragma once

#include "../floats.cuh"
#include "multiply.cuh"

namespace cupymla::nvfp4_gemv {

template <class C>
__device__ __forceinline__ void keep_sums(Storage<C>& storage, const Product<C>& product, int32_t warp, int32_t lane) {
  const int32_t row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < C::kColumnBlocks; ++block) {
    const float(&sums)[4] = product.sums[block];
    if constexpr (C::kMostColumns == 1) {
      if (column == 0) {
        storage.partial[warp][row][0] = sums[0];
        storage.partial[warp][row + 8][0] = sums[2];
      }
    } else {
      float(&tile)[C::kTileRows][C::kMostColumns] = storage.partial[warp];
      *reinterpret_cast<float2*>(&tile[row][block * 8 + column]) = make_float2(sums[0], sums[1]);
      *reinterpret_cast<float2*>(&tile[row + 8][block * 8 + column]) = make_float2(sums[2], sums[3]);
    }
  }
}

// Adds up the warps that share a tile, always in the same order, and writes the pass's rows of c.
template <class C>
__device__ __forceinline__ void write_pass(const Storage<C>& storage, const Parameters& params, const Pass<C>& pass) {
  const uint32_t n = params.n;
  // Short: it is read once, at the end, from an instruction cache that has nothing of it.
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pass.rows * n; i += C::kThreads) {
    const uint32_t row = C::kMostColumns == 1 ? i : i / n, column = i - row * n;
    const uint32_t tile = row / pass.tile_rows;
    float sum = 0.0f;
#pragma unroll 1
    for (int32_t split = 0; split < pass.splits; ++split) {
      sum += storage.partial[tile + (split << pass.tiles_log2)][row - tile * pass.tile_rows][column];
    }
    const int64_t batch = pass.batch, c_row = pass.first_row + row;
    const int64_t alpha_at = batch * params.alpha_batch + c_row * params.alpha_row;
    const float alpha = params.alpha == nullptr ? params.alpha_value : params.alpha[alpha_at];
    float value = sum * kSumUnit<C> * alpha;
    if (params.bias != nullptr) {
      value += load_float(params.bias, batch * params.bias_batch + c_row * params.bias_row, params.out_type);
    }
    const int64_t c_at = batch * params.c_batch + c_row * params.c_row + column * params.c_column;
    store_float(params.c, c_at, params.out_type, value);
  }
}

}  // namespace cupymla::nvfp4_gemv
