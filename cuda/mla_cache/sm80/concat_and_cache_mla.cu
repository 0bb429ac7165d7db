// Latents and rotary parts into slots of a cache: as bf16, or as E4M3 codes with a scale for each group of channels. A
// warp has a token; a lane has sixteen channels that become codes, or eight at a time that stay bf16. What is computed:
// `concat_and_cache_mla` in cupymla/ops/mla_cache/reference.py, to the bit.
#include "../../common/entry.cuh"
#include "../../common/page_place.cuh"
#include "../../common/types.cuh"
#include "group.cuh"
#include "latent_params.cuh"
#include "slots.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 128;
constexpr int kCtasPerSm = 9;      // at least: 36 warps, each with a kilobyte of bf16 on its way
constexpr int kWarp = 32;
constexpr int kMostLanesLog2 = 3;  // of a group
constexpr int kPieces = 2;         // of a lane, eight each, of the 512 latents of a row that stays bf16

// vLLM's rule for 656-byte rows has the least normal number as its floor; powers of two have that of `scale_of`.
__device__ __forceinline__ float latent_scale(float amax, bool pow2) {
  return pow2 ? scale_of(amax, true) : fmaxf(over_448(amax), __uint_as_float(0x00800000u));
}

// Eight channels of a row as bf16: as they are in memory, or rounded.
template <int32_t kType, bool kAligned>
__device__ __forceinline__ void store_bf16(uint8_t* target, const Loaded<kType, kAligned, kChannels>& loaded) {
  if constexpr (kType == kBfloat16) {
    const uint32_t* const words = loaded.words;
    store_vector<kAligned ? 16 : 8>(target, make_uint4(words[0], words[1], words[2], words[3]));
  } else {
    float values[kChannels];
    loaded.widen(values);
    store_vector<kAligned ? 16 : 8>(target, as_wide(values));
  }
}

// Where a slot's row is in the cache, and its scales.
struct Target {
  uint8_t* row;
  uint8_t* scales;

  __device__ __forceinline__ Target(const ConcatParameters& params, const Slot& slot) {
    const PagePlace place(slot.low, params.page, params.page_reciprocal);
    uint8_t* const block = params.cache + place.block * params.block_bytes;
    row = block + static_cast<int64_t>(place.place) * params.row_bytes;
    scales = params.exponents == 0
                 ? row + params.codes
                 : block + static_cast<int64_t>(params.page) * params.row_bytes + place.place * int64_t{8};
  }
};

// A lane's latents become codes; the first lane of a group has its scale.
template <int32_t kType, bool kAligned>
__device__ __forceinline__ void store_codes(const ConcatParameters& params, const Target& target, int lane,
                                            float (&values)[kLaneChannels], float amax) {
  const float scale = latent_scale(fminf(amax, largest(kType)), params.pow2 != 0);
  const bool is_coded = lane * kLaneChannels < params.codes;
  if (is_coded) {
    store_vector<kAligned ? 16 : 8>(target.row + lane * kLaneChannels, codes_of<kType>(values, amax, scale));
  }
  const int group = lane >> params.lanes_log2;
  if (lane != group << params.lanes_log2) return;
  if (params.exponents == 0) {
    reinterpret_cast<float*>(target.scales)[group] = scale;
  } else {
    target.scales[group] = is_coded ? static_cast<uint8_t>(__float_as_uint(scale) >> 23) : 0;  // the last of no group
  }
}

// All that a warp reads for a token is asked for before it waits for the slot.
template <int32_t kType, bool kAligned>
__device__ __forceinline__ void write_token(const ConcatParameters& params, int64_t token, int lane) {
  const int bytes = item_bytes(kType);
  const Slot slot(params.slots, token * params.slots_row, params.slots_wide != 0);
  const uint8_t* const latents = params.kv_c + token * params.kv_c_row * bytes;
  const bool has_rope = lane * kChannels < params.rope;
  Loaded<kType, kAligned, kChannels> rope;
  if (has_rope) rope.load(params.k_pe + (token * params.k_pe_row + lane * kChannels) * bytes);
  if (params.codes != 0) {
    Loaded<kType, kAligned, kLaneChannels> loaded;
    if (lane * kLaneChannels < params.codes) loaded.load(latents + lane * kLaneChannels * bytes);
    if (!slot.is_in(params.num_slots)) return;
    const Target target(params, slot);
    if (has_rope) store_bf16(target.row + params.rope_begin + lane * kChannels * 2, rope);
    float values[kLaneChannels];
    loaded.widen(values);
    const float amax = largest_magnitude<kMostLanesLog2>(values, 1 << params.lanes_log2);
    store_codes<kType, kAligned>(params, target, lane, values, amax);
  } else {
    Loaded<kType, kAligned, kChannels> pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i].load(latents + (i * kWarp + lane) * kChannels * bytes);
    // Without a branch, behind which the compiler would put the loads.
    const bool is_in = slot.is_in(params.num_slots);
    const Target target(params, slot);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (is_in) store_bf16(target.row + (i * kWarp + lane) * kChannels * 2, pieces[i]);
    }
    if (is_in && has_rope) store_bf16(target.row + params.rope_begin + lane * kChannels * 2, rope);
  }
}

template <int32_t kType, bool kAligned>
__device__ __forceinline__ void write_tokens(const ConcatParameters& params) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (; token < params.tokens; token += step) write_token<kType, kAligned>(params, token, threadIdx.x % kWarp);
}

template <int32_t kType>
struct WriteAll {
  static __device__ __forceinline__ void run(const ConcatParameters& params) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(params.kv_c) | reinterpret_cast<uintptr_t>(params.k_pe) |
                                reinterpret_cast<uintptr_t>(params.cache);
    const int64_t distances = (params.kv_c_row | params.k_pe_row) * item_bytes(kType) | params.block_bytes;
    if (((addresses | distances) & 15) == 0) {
      write_tokens<kType, true>(params);
    } else {
      write_tokens<kType, false>(params);
    }
  }
};

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads, cupymla::mla_cache::kCtasPerSm)
    concat_and_cache_mla(const __grid_constant__ cupymla::mla_cache::ConcatParameters params) {
  using namespace cupymla::mla_cache;
  dispatch_type<WriteAll>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::ConcatParameters));
