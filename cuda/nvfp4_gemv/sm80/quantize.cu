// Floats to block-scaled 4-bit codes, a block per thread. What is computed: quantize_nvfp4 in
// cupymla/ops/nvfp4_gemv/run.py, to the bit.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "conversion_params.cuh"
#include "decode.cuh"
#include "encode.cuh"
#include "../floats.cuh"
#include "places.cuh"
#include "../../common/fp8_fp4.cuh"

// CUPYMLA_MXFP4: 1 for MXFP4, 0 for NVFP4.
namespace cupymla::nvfp4_gemv {

constexpr int kThreads = 256;
constexpr bool kMxfp4 = CUPYMLA_MXFP4 != 0;
constexpr int kBlock = kMxfp4 ? 32 : 16;

// 448 * 6 / amax, which spreads the largest element over both scales; 1 for nothing but zeros. All threads of the CTA;
// the first one gets it.
__device__ __forceinline__ float factor_of(const QuantizeParameters& params) {
  __shared__ float warps[kThreads / 32];
  float amax = 0.0f;
  for (int i = threadIdx.x; i < params.partials; i += kThreads) amax = fmaxf(amax, params.partial[i]);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x != 0) return 0.0f;
  for (float part : warps) amax = fmaxf(amax, part);
  const float factor = amax == 0.0f ? 1.0f : fminf(__fdiv_rn(2688.0f, amax), 3.402823466e38f);
  if (blockIdx.x == 0) *params.made_factor = factor;
  return factor;
}

__device__ __forceinline__ float scale_of(uint32_t code) {
  if constexpr (kMxfp4) return e8m0(code);
  return __low2float(halves_of_e4m3(code));
}

// Codes of one block; returns its scale's code. Elements past k count as zeros, and their codes are not kept.
__device__ __forceinline__ uint32_t quantize_block(const float (&values)[kBlock], uint32_t (&words)[kBlock / 8]) {
  float amax = 0.0f;
  bool nan = false;
#pragma unroll
  for (int e = 0; e < kBlock; ++e) {
    amax = fmaxf(amax, fabsf(values[e]));
    nan |= is_nan(values[e]);
  }
  if (nan) amax = __uint_as_float(0x7FFFFFFFu);
  const uint32_t code = kMxfp4 ? e8m0_code_of_amax(amax) : e4m3_code(__fdiv_rn(amax, 6.0f));
  const float scale = scale_of(code);
#pragma unroll
  for (int w = 0; w < kBlock / 8; ++w) {
    words[w] = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float value = values[8 * w + e];
      // A scale of zero leaves signed zeros.
      const float quotient = scale == 0.0f ? value * 0.0f : __fdiv_rn(value, scale);
      words[w] |= (nan ? 7u : e2m1_code(quotient)) << (4 * e);
    }
  }
  return code;
}

__device__ __forceinline__ void write_block(const QuantizeParameters& params, const Place& place, float factor,
                                            uint8_t& scale) {
  float values[kBlock];
  uint32_t words[kBlock / 8];
  const int64_t first = place.column * kBlock;
  const int64_t start = place.batch * params.x_batch + place.row * params.x_row + first;
  const int64_t left = params.k - first;
  if (left >= kBlock) {
    load_floats(values, params.x, start, params.type);
#pragma unroll
    for (float& value : values) value *= factor;
  } else {
#pragma unroll
    for (int e = 0; e < kBlock; ++e) {
      values[e] = e < left ? load_float(params.x, start + e, params.type) * factor : 0.0f;
    }
  }
  scale = static_cast<uint8_t>(quantize_block(values, words));
  uint8_t* target = params.packed + place.batch * params.packed_batch + place.row * params.packed_row + first / 2;
  if (left >= kBlock && (reinterpret_cast<uintptr_t>(target) & 3) == 0) {
#pragma unroll
    for (int word = 0; word < kBlock / 8; ++word) reinterpret_cast<uint32_t*>(target)[word] = words[word];
    return;
  }
#pragma unroll
  for (int byte = 0; byte < kBlock / 2; ++byte) {
    if (2 * byte < left) target[byte] = static_cast<uint8_t>(words[byte / 4] >> (byte % 4 * 8));
  }
}

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::kThreads, 2)
    nvfp4_quantize(const __grid_constant__ cupymla::nvfp4_gemv::QuantizeParameters params) {
  using namespace cupymla::nvfp4_gemv;
  __shared__ float shared_factor;
  cupymla::griddepcontrol_wait();
  const float found = params.partial != nullptr ? factor_of(params) : 0.0f;
  if (threadIdx.x == 0) {
    shared_factor = params.partial != nullptr  ? found
                    : params.factor != nullptr ? *params.factor
                                               : params.factor_value;
  }
  __syncthreads();
  const float factor = shared_factor;
  const int64_t columns = (params.k + kBlock - 1) / kBlock;
  const int64_t column_blocks = (columns + 3) / 4;
  const int64_t all_rows = params.swizzled ? padded_rows(params.m) : params.m;
  const int64_t all_columns = params.swizzled ? 4 * column_blocks : columns;
  for (int64_t i = first_number(); i < all_rows * all_columns * params.batches; i += number_step()) {
    const Place place(i, all_rows, all_columns);
    const int64_t offset = params.swizzled ? swizzled_scale(place.row, place.column, column_blocks)
                                           : place.row * params.scales_row + place.column;
    uint8_t& scale = params.scales[place.batch * params.scales_batch + offset];
    if (place.row < params.m && place.column < columns) {
      write_block(params, place, factor, scale);
    } else {
      scale = 0;
    }
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::QuantizeParameters),
                     block = cupymla::nvfp4_gemv::kBlock);
