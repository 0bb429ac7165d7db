// Rows of latents and rotary parts out of a cache's pages, as bf16. A lane has eight channels. What is computed:
// `gather_mla_cache` in cupymla/ops/mla_cache/reference.py.
#include "../../common/entry.cuh"
#include "../../common/math.cuh"
#include "../../common/types.cuh"
#include "decode.cuh"
#include "floats.cuh"
#include "latent_params.cuh"
#include "places.cuh"
#include "rows.cuh"
#include "wide.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;

// A byte of E8M0: 255 is NaN, 0 is 2^-127, which is subnormal.
__device__ __forceinline__ float exponent_scale(uint32_t exponent) {
  return __uint_as_float(exponent == 255u ? 0x7fc00000u : exponent == 0u ? 0x00400000u : exponent << 23);
}

// Eight channels of a slot of the cache.
__device__ __forceinline__ uint4 channels_at(const GatherLatentParameters& params, int64_t slot, int32_t channel) {
  const int64_t block = quotient(slot, params.page), place = slot - block * params.page;
  const uint8_t* const begin = params.cache + block * params.block_bytes;
  const uint8_t* const row = begin + place * params.row_bytes;
  if (channel >= params.codes) return load_wide(row + params.wide_begin + (channel - params.codes) * 2);
  const int32_t group = channel >> params.group_log2;
  const uint8_t* const exponents = begin + static_cast<int64_t>(params.page) * params.row_bytes + place * 8;
  const float scale = params.exponents != 0 ? exponent_scale(__ldg(exponents + group))
                                            : __ldg(reinterpret_cast<const float*>(row + params.codes) + group);
  float values[kChannels];
  decode(values, load_bytes(row + channel), scale);
  return as_wide(values);
}

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads)
    gather_mla_cache(const __grid_constant__ cupymla::mla_cache::GatherLatentParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  const int32_t pieces = params.channels / kChannels;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.rows * pieces; i += step) {
    const int64_t row = quotient(i, pieces);
    const int32_t channel = static_cast<int32_t>(i - row * pieces) * kChannels;
    const int64_t slot = params.slots != nullptr
                             ? integer_at(params.slots, row * params.slots_row, params.slots_wide != 0)
                             : slot_of(params, static_cast<int32_t>(row));
    uint4 words = make_uint4(0u, 0u, 0u, 0u);
    if (slot >= 0 && slot < params.num_slots) words = channels_at(params, slot, channel);
    store_wide(params.kv + (row * params.kv_row + channel) * 2, words);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::GatherLatentParameters));
