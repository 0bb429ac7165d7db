// Eight bf16 as bits: channels that a cache keeps as they are, NaN payloads included.
#pragma once

#include "../../common/types.cuh"
#include "floats.cuh"

namespace cupymla::mla_cache {

// From an address of any multiple of two bytes.
__device__ __forceinline__ uint4 load_wide(const uint8_t* source) {
  if (is_aligned(source, 16)) return __ldg(reinterpret_cast<const uint4*>(source));
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(source);
  uint32_t words[kChannels / 2];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) words[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_wide(uint8_t* target, uint4 words) {
  if (is_aligned(target, 16)) {
    *reinterpret_cast<uint4*>(target) = words;
  } else {
    store_bytes(target, make_uint2(words.x, words.y));
    store_bytes(target + 8, make_uint2(words.z, words.w));
  }
}

// Numbers as eight bf16, to nearest even.
__device__ __forceinline__ uint4 as_wide(const float (&values)[kChannels]) {
  return make_uint4(pack_pair<__nv_bfloat16>(values[0], values[1]), pack_pair<__nv_bfloat16>(values[2], values[3]),
                    pack_pair<__nv_bfloat16>(values[4], values[5]), pack_pair<__nv_bfloat16>(values[6], values[7]));
}

}  // namespace cupymla::mla_cache
