// Latents and rotary parts into slots of a cache: as bf16, or as E4M3 codes with a scale for each group of channels. A
// lane has eight channels; all pieces of latents come first, then those of rotary parts, so that the lanes of a group
// lie side by side in a warp. What is computed: `concat_and_cache_mla` in cupymla/ops/mla_cache/reference.py, to
// the bit.
#include "../../common/entry.cuh"
#include "../../common/math.cuh"
#include "../../common/types.cuh"
#include "group.cuh"
#include "latent_params.cuh"
#include "rows.cuh"
#include "wide.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;

// vLLM's rule for 656-byte rows has the least normal number as its floor; powers of two have that of `scale_of`.
__device__ __forceinline__ float latent_scale(float amax, bool pow2) {
  return pow2 ? scale_of(amax, true) : fmaxf(__fdiv_rn(amax, 448.0f), __uint_as_float(0x00800000u));
}

// Where a slot's row is in the cache, and its scales.
struct Place {
  uint8_t* row;  // null: nowhere
  uint8_t* scales;
};

__device__ __forceinline__ Place place_of(const ConcatParameters& params, int64_t token) {
  const int64_t slot = integer_at(params.slots, token * params.slots_row, params.slots_wide != 0);
  if (slot < 0 || slot >= params.num_slots) return {nullptr, nullptr};
  const int64_t block = quotient(slot, params.page), place = slot - block * params.page;
  uint8_t* const begin = params.cache + block * params.block_bytes;
  uint8_t* const row = begin + place * params.row_bytes;
  if (params.exponents == 0) return {row, row + params.codes};
  return {row, begin + static_cast<int64_t>(params.page) * params.row_bytes + place * 8};
}

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads)
    concat_and_cache_mla(const __grid_constant__ cupymla::mla_cache::ConcatParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  const int64_t latents = params.tokens * (params.channels / kChannels);
  const int64_t total = latents + params.tokens * (params.rope / kChannels);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int lanes = 1 << params.lanes_log2;
  const float limit = largest(params.type);
  int64_t index = thread;
  // All lanes of a warp go on as long as its first one has a piece: shuffles need every lane.
  for (int64_t first = thread & ~int64_t{31}; first < total; first += step, index += step) {
    const bool is_latent = index < latents;
    const bool is_coded = is_latent && params.codes != 0;
    Place place{nullptr, nullptr};
    int32_t channel = 0;
    float values[kChannels] = {};
    if (index < total) {
      const int64_t piece = is_latent ? index : index - latents;
      const int32_t pieces = (is_latent ? params.channels : params.rope) / kChannels;
      const int64_t token = quotient(piece, pieces);
      channel = static_cast<int32_t>(piece - token * pieces) * kChannels;
      place = place_of(params, token);
      const int64_t offset = token * (is_latent ? params.kv_c_row : params.k_pe_row) + channel;
      const uint8_t* const source = (is_latent ? params.kv_c : params.k_pe) + offset * item_bytes(params.type);
      if (place.row != nullptr && (is_coded || params.type != kBfloat16)) load_channels(values, source, params.type);
      if (place.row != nullptr && !is_coded) {
        const int32_t before = is_latent ? 0 : params.channels - params.codes;  // bf16 channels of the row
        uint8_t* const target = place.row + params.wide_begin + (before + channel) * 2;
        store_wide(target, params.type == kBfloat16 ? load_wide(source) : as_wide(values));
      }
    }
    if (params.codes == 0) continue;
    const float amax = largest_magnitude(values, limit, lanes);
    if (place.row == nullptr || !is_coded) continue;
    const float scale = latent_scale(amax, params.pow2 != 0);
    store_bytes(place.row + channel, codes_of(values, scale));
    const int32_t piece = channel / kChannels, group = piece >> params.lanes_log2;
    if ((piece & (lanes - 1)) != 0) continue;
    if (params.exponents == 0) {
      reinterpret_cast<float*>(place.scales)[group] = scale;
    } else {
      place.scales[group] = static_cast<uint8_t>(__float_as_uint(scale) >> 23);
      if (group == 0) place.scales[7] = 0;  // of no group
    }
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::ConcatParameters));
