// Rows times the Hadamard matrix: sums and differences of pairs, at distances 1, 2, 4 and so on, in fp32. A thread has
// eight channels; longer distances go through shuffles, and from a warp's 256 channels on through shared memory. What
// is computed: `hadamard` in cupymla/ops/mla_cache/reference.py, to the bit.
//
// The only barrier is __syncthreads, twice in each distance between warps: a row's channels are written, then read by
// their partners, before the next ones are written. All threads of a CTA have the same number of rounds.
#include "../../common/entry.cuh"
#include "../../common/types.cuh"
#include "floats.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace cupymla::mla_cache {

constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;

// The pairs inside of a thread.
__device__ __forceinline__ void own_pairs(float (&values)[kChannels]) {
#pragma unroll
  for (int distance = 1; distance < kChannels; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      if ((i & distance) != 0) continue;
      const float low = values[i], high = values[i + distance];
      values[i] = low + high;
      values[i + distance] = low - high;
    }
  }
}

// What a number becomes, of the pair that it is in: the lower one has the sum.
__device__ __forceinline__ float of_pair(float own, float other, bool lower) {
  return lower ? own + other : other - own;
}

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kMaxThreads)
    hadamard(const __grid_constant__ cupymla::mla_cache::HadamardParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  extern __shared__ __align__(16) float4 shared[];  // [threads][2], where a row has several warps
  const int lanes = 1 << params.lanes_log2;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t rows = params.extents[0] * params.extents[1] * params.extents[2];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x >> params.lanes_log2;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  int64_t number = (begin + threadIdx.x) >> params.lanes_log2;
  // All threads of a CTA go on as long as its first row is one.
  for (int64_t first = begin >> params.lanes_log2; first < rows; first += step, number += step) {
    float values[kChannels] = {};
    const Row row(number, params.extents);
    const int64_t channel = static_cast<int64_t>(lane) * kChannels;
    if (number < rows) {
      const int64_t offset = row.offset(params.x_strides) + channel;
      load_channels(values, params.x + offset * item_bytes(params.type), params.type);
    }
    own_pairs(values);
    for (int distance = 1; distance < min(lanes, kWarp); distance *= 2) {
#pragma unroll
      for (float& value : values) {
        value = of_pair(value, __shfl_xor_sync(0xffffffffu, value, distance), (lane & distance) == 0);
      }
    }
    for (int distance = kWarp; distance < lanes; distance *= 2) {
      shared[2 * threadIdx.x] = make_float4(values[0], values[1], values[2], values[3]);
      shared[2 * threadIdx.x + 1] = make_float4(values[4], values[5], values[6], values[7]);
      __syncthreads();
      const unsigned partner = threadIdx.x ^ static_cast<unsigned>(distance);
      const float4 low = shared[2 * partner], high = shared[2 * partner + 1];
      const float others[kChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kChannels; ++i) values[i] = of_pair(values[i], others[i], (lane & distance) == 0);
      __syncthreads();
    }
    if (number >= rows) continue;
#pragma unroll
    for (float& value : values) value = __fmul_rn(value, params.factor);
    const int64_t target = row.offset(params.out_strides) + channel;
    store_channels(params.out + target * item_bytes(params.type), values, params.type);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kMaxThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::HadamardParameters));
