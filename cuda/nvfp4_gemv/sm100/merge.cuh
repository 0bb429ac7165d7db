// From Tensor Memory to c: the accumulators of a CTA, then the CTAs of a cluster, always added in the same order.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "../floats.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// This CTA's sums of a row, to `partial`. Warps 0-3, whose threads have a lane each.
template <class C>
__device__ __forceinline__ void keep_sums(Storage<C>& storage, uint32_t tmem, const Slice<C>& slice) {
  storage.done.wait(0);
  sm100::fence_after_sync();
  float sums[C::kSumColumns];
  sm100::tmem_load(sums, sm100::tmem_lane(tmem, threadIdx.x / 32 * 32));
  sm100::wait_loads();
  sm100::fence_before_sync();
  const uint32_t used = min(slice.end - slice.first, C::kAccumulators);
  auto* row = reinterpret_cast<float4*>(storage.partial() + threadIdx.x * C::kColumns);
#pragma unroll
  for (uint32_t column = 0; column < C::kColumns; column += 4) {
    float four[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      four[i] = sums[column + i];
#pragma unroll
      for (uint32_t other = 1; other < C::kAccumulators; ++other) {
        // What was never used holds anything.
        if (other < used) four[i] += sums[other * C::kColumns + column + i];
      }
    }
    row[column / 4] = make_float4(four[0], four[1], four[2], four[3]);
  }
}

// This CTA's share of the tile's rows of c, from the sums of the whole cluster.
template <class C>
__device__ __forceinline__ void write_rows(Storage<C>& storage, const Parameters& params, const Slice<C>& slice) {
  const uint32_t rows = C::kTileRows / slice.splits, n = params.n;
  const uint32_t partial = smem_address(storage.partial());
  const int64_t batch = slice.batch;
  for (uint32_t i = threadIdx.x; i < rows * n; i += C::kThreads) {
    const uint32_t row = slice.rank * rows + i / n, column = i % n;
    const int64_t c_row = static_cast<int64_t>(slice.tile) * C::kTileRows + row;
    if (c_row >= params.m) return;
    const uint32_t place = partial + (row * C::kColumns + column) * sizeof(float);
    float sum = 0.0f;
    for (uint32_t rank = 0; rank < slice.splits; ++rank) sum += cluster_load_float(cluster_address(place, rank));
    const float alpha = params.alpha == nullptr ? params.alpha_value
                                                : params.alpha[batch * params.alpha_batch + c_row * params.alpha_row];
    float value = sum * alpha;
    if (params.bias != nullptr) {
      value += load_float(params.bias, batch * params.bias_batch + c_row * params.bias_row, params.out_type);
    }
    const int64_t c_at = batch * params.c_batch + c_row * params.c_row + column * params.c_column;
    store_float(params.c, c_at, params.out_type, value);
  }
}

}  // namespace cupymla::nvfp4_gemv
