// Writes new keys and values into their slots of the paged cache; slots outside the cache are skipped.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../../common/entry.cuh"
#include "../../common/integers.cuh"

// CUPYMLA_QUERY: the new keys' dtype, 32 for fp32, 16 for fp16, 0 for bf16. CUPYMLA_CACHE: 0 for the same, 43 for e4m3,
// 52 for e5m2.
#if CUPYMLA_QUERY == 32
using Source = float;
#elif CUPYMLA_QUERY == 16
using Source = __half;
#else
using Source = __nv_bfloat16;
#endif

namespace cupymla::xl_paged_attention {

struct ReshapeParameters {
  const uint8_t* key;       // [num_tokens, num_kv_heads, head_size]
  const uint8_t* value;
  uint8_t* k_cache;
  uint8_t* v_cache;
  const uint8_t* slots;     // [num_tokens] int32 or int64
  const float* k_scales;    // [num_kv_heads] or null
  const float* v_scales;
  int64_t key_token, key_head, value_token, value_head;  // in elements, as all strides here
  int64_t k_block, k_head, k_token, k_chunk;
  int64_t v_block, v_head, v_token, v_channel;
  int64_t slots_token, k_scales_head, v_scales_head;
  int64_t num_tokens;
  int64_t num_slots;
  int32_t num_kv_heads, head_size, block_size;
  int32_t chunk;            // k_cache elements that lie together
  int32_t slots_wide;       // 1: slots are int64
  float k_scale, v_scale;   // for all KV heads, beside k_scales and v_scales
};

constexpr int kReshapeThreads = 256;

#if CUPYMLA_CACHE == 0
using Stored = Source;
__device__ __forceinline__ Stored stored(Source value, float) { return value; }
#else
using Stored = uint8_t;
// Rounded to nearest even, saturated to the largest finite value; NaN stays NaN.
__device__ __forceinline__ Stored stored(Source value, float scale) {
  return __nv_cvt_float_to_fp8(__fdiv_rn(static_cast<float>(value), scale), __NV_SATFINITE,
                               CUPYMLA_CACHE == 43 ? __NV_E4M3 : __NV_E5M2);
}
#endif

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kReshapeThreads)
    reshape_and_cache(const __grid_constant__ cupymla::xl_paged_attention::ReshapeParameters params) {
  using namespace cupymla;
  using namespace cupymla::xl_paged_attention;
  const int64_t row = static_cast<int64_t>(params.num_kv_heads) * params.head_size;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < row * params.num_tokens;
       index += step) {
    const int64_t token = index / row;
    const int64_t place = token * params.slots_token;
    const int64_t slot = params.slots_wide != 0 ? reinterpret_cast<const int64_t*>(params.slots)[place]
                                                : reinterpret_cast<const int32_t*>(params.slots)[place];
    if (slot < 0 || slot >= params.num_slots) continue;
    const int64_t block = slot / params.block_size;
    const int64_t inside = slot % params.block_size;
    const int32_t head = static_cast<int32_t>(index % row) / params.head_size;
    const int32_t channel = static_cast<int32_t>(index % row) % params.head_size;
    const float k_scale = params.k_scales != nullptr ? params.k_scales[head * params.k_scales_head] : params.k_scale;
    const float v_scale = params.v_scales != nullptr ? params.v_scales[head * params.v_scales_head] : params.v_scale;
    const Source key =
        reinterpret_cast<const Source*>(params.key)[token * params.key_token + head * params.key_head + channel];
    const Source value = reinterpret_cast<const Source*>(
        params.value)[token * params.value_token + head * params.value_head + channel];
    reinterpret_cast<Stored*>(params.k_cache)[block * params.k_block + head * params.k_head + inside * params.k_token +
                                              channel / params.chunk * params.k_chunk + channel % params.chunk] =
        stored(key, k_scale);
    reinterpret_cast<Stored*>(params.v_cache)[block * params.v_block + head * params.v_head + inside * params.v_token +
                                              channel * params.v_channel] = stored(value, v_scale);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kReshapeThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::ReshapeParameters));
