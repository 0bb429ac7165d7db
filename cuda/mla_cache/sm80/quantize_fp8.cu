// Floats to E4M3 codes with a scale for each group of channels: into arrays, or into slots of a cache of indexer keys.
// Lanes that lie side by side share a group, sixteen channels each. What is computed: `quantized` in
// cupymla/ops/mla_cache/reference.py, to the bit.
#include "../../common/entry.cuh"
#include "../../common/page_place.cuh"
#include "../../common/types.cuh"
#include "group.cuh"
#include "pages.cuh"
#include "params.cuh"
#include "rows.cuh"
#include "slots.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 128;
constexpr int kCtasPerSm = 9;      // at least: 36 warps, each with a kilobyte of bf16 on its way
constexpr int kMostLanesLog2 = 4;  // of a group

// A group by its number over all rows.
struct Group {
  int64_t number, group;  // its row's number, and its own in the row
  Row row;

  __device__ __forceinline__ Group(const QuantizeParameters& params, int64_t index)
      : number(params.groups == 1 ? index : quotient(index, params.groups)),
        group(index - number * params.groups),
        row(number, params.extents) {}
};

// Where a row's codes begin, and the scale of a group.
struct Target {
  uint8_t* codes;
  float* scale;

  __device__ __forceinline__ Target(const QuantizeParameters& params, const Group& at, const Slot& slot) {
    if (params.slots == nullptr) {
      codes = params.codes + at.row.offset(params.codes_strides);
      scale = reinterpret_cast<float*>(params.scales) + at.row.offset(params.scales_strides) +
              at.group * params.scales_group;
    } else {
      const PagePlace place(slot.low, params.page, params.page_reciprocal);
      const IndexerSlot bytes(place.block, place.place, params.page, params.block_bytes);
      codes = params.codes + bytes.codes;
      scale = reinterpret_cast<float*>(params.codes + bytes.scale);
    }
  }
};

template <int32_t kType, bool kAligned>
__device__ __forceinline__ void quantize_groups(const QuantizeParameters& params) {
  const int lanes = 1 << params.lanes_log2, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t total = params.extents[0] * params.extents[1] * params.extents[2] * params.groups;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads >> params.lanes_log2;
  int64_t index = thread >> params.lanes_log2;
  // All lanes of a warp go on as long as its first group is one: shuffles need every lane.
  for (int64_t first = (thread & ~int64_t{31}) >> params.lanes_log2; first < total; first += step, index += step) {
    const bool is_group = index < total;
    const Group at(params, is_group ? index : first);
    const int64_t channel = (at.group << params.lanes_log2 | lane) * kLaneChannels;
    // All that is read is asked for before the slot is waited for.
    const Slot slot(params.slots, at.number * params.slots_row, params.slots_wide != 0);
    Loaded<kType, kAligned, kLaneChannels> loaded;
    loaded.load(params.x + (at.row.offset(params.x_strides) + channel) * item_bytes(kType));
    float values[kLaneChannels];
    loaded.widen(values);
    const float amax = largest_magnitude<kMostLanesLog2>(values, lanes);
    if (!is_group || (params.slots != nullptr && !slot.is_in(params.num_slots))) continue;
    const Target target(params, at, slot);
    const float scale = scale_of(fminf(amax, largest(kType)), params.pow2 != 0);
    store_vector<kAligned ? 16 : 1>(target.codes + channel, codes_of<kType>(values, amax, scale));
    if (lane == 0) *target.scale = scale;
  }
}

template <int32_t kType>
struct QuantizeAll {
  static __device__ __forceinline__ void run(const QuantizeParameters& params) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(params.x) | reinterpret_cast<uintptr_t>(params.codes);
    int64_t distances = params.block_bytes;
#pragma unroll
    for (int i = 0; i < kAxes; ++i) distances |= params.x_strides[i] * item_bytes(kType) | params.codes_strides[i];
    if (((addresses | distances) & 15) == 0) {
      quantize_groups<kType, true>(params);
    } else {
      quantize_groups<kType, false>(params);
    }
  }
};

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads, cupymla::mla_cache::kCtasPerSm)
    quantize_fp8(const __grid_constant__ cupymla::mla_cache::QuantizeParameters params) {
  using namespace cupymla::mla_cache;
  dispatch_type<QuantizeAll>(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::QuantizeParameters));
