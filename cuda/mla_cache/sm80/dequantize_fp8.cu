// E4M3 codes with a scale for each group of channels to bf16, eight channels a thread: one fp32 product each, rounded.
// What is computed: `dequantize_fp8` in cupymla/ops/mla_cache/reference.py.
#include "../../common/entry.cuh"
#include "../../common/types.cuh"
#include "decode.cuh"
#include "floats.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads)
    dequantize_fp8(const __grid_constant__ cupymla::mla_cache::DequantizeParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  const int64_t pieces = params.channels / kChannels;  // of a row
  const int64_t total = params.extents[0] * params.extents[1] * params.extents[2] * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t number = quotient(i, pieces), channel = (i - number * pieces) * kChannels;
    const Row row(number, params.extents);
    const int64_t place = row.offset(params.scales_strides) + (channel >> params.group_log2) * params.scales_group;
    const float scale = __ldg(reinterpret_cast<const float*>(params.scales) + place);
    float values[kChannels];
    decode(values, load_bytes(params.codes + row.offset(params.codes_strides) + channel), scale);
    const int64_t target = row.offset(params.out_strides) + channel;
    store_channels(params.out + target * item_bytes(kBfloat16), values, kBfloat16);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::DequantizeParameters));
