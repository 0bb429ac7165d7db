// Block-scaled 4-bit codes to floats, a block per thread. What is computed: dequantize_nvfp4 in
// cupymla/ops/nvfp4_gemv/run.py, to the bit.
#include "../../common/entry.cuh"
#include "../../common/fp8_fp4.cuh"
#include "conversion_params.cuh"
#include "decode.cuh"
#include "../floats.cuh"
#include "places.cuh"

// CUPYMLA_MXFP4: 1 for MXFP4, 0 for NVFP4.
namespace cupymla::nvfp4_gemv {

constexpr int kThreads = 256;
constexpr bool kMxfp4 = CUPYMLA_MXFP4 != 0;
constexpr int kBlock = kMxfp4 ? 32 : 16;

__device__ __forceinline__ float e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float value = magnitude < 2 ? 0.5f * magnitude : __uint_as_float((magnitude + (126u << 1)) << 22);
  return code & 8u ? -value : value;
}

__device__ __forceinline__ void write_block(const DequantizeParameters& params, const Place& place, float factor,
                                            float scale) {
  const int64_t first = place.column * kBlock;
  const int64_t left = params.k - first;
  const uint8_t* codes = params.packed + place.batch * params.packed_batch + place.row * params.packed_row + first / 2;
  const int64_t start = place.batch * params.out_batch + place.row * params.out_row + first;
  if (left >= kBlock && (reinterpret_cast<uintptr_t>(codes) & 3) == 0) {
    float values[kBlock];
#pragma unroll
    for (int word = 0; word < kBlock / 8; ++word) {
      const uint32_t eight = reinterpret_cast<const uint32_t*>(codes)[word];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[8 * word + e] = __fdiv_rn(e2m1(eight >> (4 * e) & 15u) * scale, factor);
    }
    store_floats(params.out, start, params.type, values);
    return;
  }
#pragma unroll
  for (int byte = 0; byte < kBlock / 2; ++byte) {
    if (2 * byte < left) {
      const uint32_t pair = codes[byte];
      store_float(params.out, start + 2 * byte, params.type, __fdiv_rn(e2m1(pair & 15u) * scale, factor));
      store_float(params.out, start + 2 * byte + 1, params.type, __fdiv_rn(e2m1(pair >> 4) * scale, factor));
    }
  }
}

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::kThreads)
    nvfp4_dequantize(const __grid_constant__ cupymla::nvfp4_gemv::DequantizeParameters params) {
  using namespace cupymla;
  using namespace cupymla::nvfp4_gemv;
  const float factor = params.factor != nullptr ? *params.factor : params.factor_value;
  const int64_t columns = (params.k + kBlock - 1) / kBlock;
  const int64_t column_blocks = (columns + 3) / 4;
  for (int64_t i = first_number(); i < params.m * columns * params.batches; i += number_step()) {
    const Place place(i, params.m, columns);
    const int64_t offset = params.swizzled ? swizzled_scale(place.row, place.column, column_blocks)
                                           : place.row * params.scales_row + place.column;
    const uint32_t code = params.scales[place.batch * params.scales_batch + offset];
    write_block(params, place, factor, kMxfp4 ? e8m0(code) : __low2float(halves_of_e4m3(code)));
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::DequantizeParameters),
                     block = cupymla::nvfp4_gemv::kBlock);
