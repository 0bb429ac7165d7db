// Writes new keys and values into their slots of the paged cache; slots outside the cache are skipped. A thread takes
// 16 bytes of a key and of a value: head sizes are multiples of eight, rows are aligned to 16 bytes, and neither a
// chunk of k_cache nor a row of either cache ends within such a vector.
#include <cuda_fp8.h>

#include "../../common/math.cuh"
#include "../../common/entry.cuh"
#include "../../common/types.cuh"
#include "query_type.cuh"

// CUPYMLA_CACHE: 0 for the dtype of the new keys, which is the query's, 43 for e4m3, 52 for e5m2.
namespace cupymla::xl_paged_attention {

using Source = ThisQuery;  // of new keys and values

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

constexpr int kVector = 16 / sizeof(Source);

struct alignas(kVector * sizeof(Stored)) Packed {
  Stored elements[kVector];
};

__device__ __forceinline__ Packed packed(const uint8_t* rows, int64_t place, float scale) {
  const uint4 bits = __ldg(reinterpret_cast<const uint4*>(reinterpret_cast<const Source*>(rows) + place));
  const Source* const values = reinterpret_cast<const Source*>(&bits);
  Packed made;
#pragma unroll
  for (int i = 0; i < kVector; ++i) made.elements[i] = stored(values[i], scale);
  return made;
}

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kReshapeThreads)
    reshape_and_cache(const __grid_constant__ cupymla::xl_paged_attention::ReshapeParameters params) {
  using namespace cupymla;
  using namespace cupymla::xl_paged_attention;
  const int32_t head_vectors = params.head_size / kVector;
  const int64_t vectors = static_cast<int64_t>(params.num_kv_heads) * head_vectors;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < vectors * params.num_tokens;
       index += step) {
    const int64_t token = quotient(index, vectors);
    const int64_t place = token * params.slots_token;
    const int64_t slot = params.slots_wide != 0 ? reinterpret_cast<const int64_t*>(params.slots)[place]
                                                : reinterpret_cast<const int32_t*>(params.slots)[place];
    if (slot < 0 || slot >= params.num_slots) continue;
    const int64_t block = quotient(slot, params.block_size);
    const int64_t inside = slot - block * params.block_size;
    const int64_t vector = index - token * vectors;
    const int64_t head = quotient(vector, head_vectors);
    const int32_t channel = static_cast<int32_t>(vector - head * head_vectors) * kVector;
    const int32_t chunk = channel / params.chunk;
    const float k_scale = params.k_scales != nullptr ? params.k_scales[head * params.k_scales_head] : params.k_scale;
    const float v_scale = params.v_scales != nullptr ? params.v_scales[head * params.v_scales_head] : params.v_scale;
    const Packed key = packed(params.key, token * params.key_token + head * params.key_head + channel, k_scale);
    const Packed value = packed(params.value, token * params.value_token + head * params.value_head + channel, v_scale);
    Stored* const keys = reinterpret_cast<Stored*>(params.k_cache) + block * params.k_block + head * params.k_head +
                         inside * params.k_token + chunk * params.k_chunk + (channel - chunk * params.chunk);
    Stored* const values = reinterpret_cast<Stored*>(params.v_cache) + block * params.v_block + head * params.v_head +
                           inside * params.v_token + channel * params.v_channel;
    *reinterpret_cast<Packed*>(keys) = key;
    if (params.v_channel == 1) {
      *reinterpret_cast<Packed*>(values) = value;
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i * params.v_channel] = value.elements[i];
    }
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kReshapeThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::ReshapeParameters));
