// y[..., i, j] = x[..., i, j + q_len - 1 - i] where that column exists, else 0; see cupymla/ops/xl_paged_attention.
#include "../../common/math.cuh"
#include "../../common/entry.cuh"
#include "../../common/types.cuh"

// CUPYMLA_UNIT: bytes of an element, 2 or 4. Zero is all bits zero in every dtype.
#if CUPYMLA_UNIT == 2
using Element = cupymla::uint16_t;
#else
using Element = cupymla::uint32_t;
#endif

namespace cupymla::xl_paged_attention {

struct ShiftParameters {
  const uint8_t* x;
  uint8_t* out;
  int64_t extent[4];  // outer, outer, q_len, k_len
  int64_t x_stride[4];
  int64_t out_stride[4];
};

constexpr int kShiftThreads = 256;

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kShiftThreads)
    rel_shift(const __grid_constant__ cupymla::xl_paged_attention::ShiftParameters params) {
  using namespace cupymla;
  const int64_t q_len = params.extent[2];
  const int64_t k_len = params.extent[3];
  const int64_t total = params.extent[0] * params.extent[1] * q_len * k_len;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < total; index += step) {
    const int64_t row = quotient(index, k_len);
    const int64_t j = index - row * k_len;
    const int64_t rest = quotient(row, q_len);
    const int64_t i = row - rest * q_len;
    const int64_t outer = quotient(rest, params.extent[1]);
    const int64_t inner = rest - outer * params.extent[1];
    const int64_t column = j + q_len - 1 - i;
    Element value = 0;
    if (column < k_len) {
      value = reinterpret_cast<const Element*>(params.x)[outer * params.x_stride[0] + inner * params.x_stride[1] +
                                                         i * params.x_stride[2] + column * params.x_stride[3]];
    }
    reinterpret_cast<Element*>(params.out)[outer * params.out_stride[0] + inner * params.out_stride[1] +
                                           i * params.out_stride[2] + j * params.out_stride[3]] = value;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kShiftThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::ShiftParameters));
