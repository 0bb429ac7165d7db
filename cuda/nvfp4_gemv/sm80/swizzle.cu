// Scales between the linear and the 128x4 layout, four columns per thread.
#include "../../common/entry.cuh"
#include "conversion_params.cuh"
#include "places.cuh"

namespace cupymla::nvfp4_gemv {

constexpr int kThreads = 256;

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::kThreads)
    nvfp4_swizzle(const __grid_constant__ cupymla::nvfp4_gemv::SwizzleParameters params) {
  using namespace cupymla;
  using namespace cupymla::nvfp4_gemv;
  const int64_t column_blocks = (params.columns + 3) / 4;
  const int64_t all_rows = params.backwards ? params.rows : padded_rows(params.rows);
  for (int64_t i = first_number(); i < all_rows * column_blocks * params.batches; i += number_step()) {
    const Place place(i, all_rows, column_blocks);
    const int64_t swizzled = swizzled_scale(place.row, 4 * place.column, column_blocks);
    const int64_t linear = place.row * (params.backwards ? params.target_row : params.source_row) + 4 * place.column;
    const uint8_t* source =
        params.source + place.batch * params.source_batch + (params.backwards ? swizzled : linear);
    uint8_t* target = params.target + place.batch * params.target_batch + (params.backwards ? linear : swizzled);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool inside = place.row < params.rows && 4 * place.column + j < params.columns;
      if (inside) {
        target[j] = source[j];
      } else if (!params.backwards) {
        target[j] = 0;
      }
    }
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::SwizzleParameters));
