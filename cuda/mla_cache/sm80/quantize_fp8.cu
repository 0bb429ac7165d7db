// Floats to E4M3 codes with a scale for each group of channels: into arrays, or into slots of a cache of indexer keys.
// Lanes that lie side by side share a group, eight channels each. What is computed: `quantized` in
// cupymla/ops/mla_cache/reference.py, to the bit.
#include "../../common/entry.cuh"
#include "../../common/types.cuh"
#include "group.cuh"
#include "pages.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;

// Where the codes of a group go, and its scale.
struct Target {
  uint8_t* codes;  // null: nowhere
  float* scale;
};

__device__ __forceinline__ Target target_of(const QuantizeParameters& params, int64_t number, const Row& row,
                                            int64_t group, int64_t channel) {
  float* const scales = reinterpret_cast<float*>(params.scales);
  if (params.slots == nullptr) {
    return {params.codes + row.offset(params.codes_strides) + channel,
            scales + row.offset(params.scales_strides) + group * params.scales_group};
  }
  const int64_t slot = integer_at(params.slots, number * params.slots_row, params.slots_wide != 0);
  if (slot < 0 || slot >= params.num_slots) return {nullptr, nullptr};
  const IndexerSlot place(slot, params.page, params.block_bytes);
  return {params.codes + place.codes + channel, reinterpret_cast<float*>(params.codes + place.scale)};
}

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads)
    quantize_fp8(const __grid_constant__ cupymla::mla_cache::QuantizeParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  const int lanes_log2 = params.lanes_log2, lanes = 1 << lanes_log2;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t rows = params.extents[0] * params.extents[1] * params.extents[2];
  const int64_t total = rows * params.groups;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads >> lanes_log2;
  const float limit = largest(params.type);
  int64_t index = thread >> lanes_log2;
  // All lanes of a warp go on as long as its first group is one: shuffles need every lane.
  for (int64_t first = (thread & ~int64_t{31}) >> lanes_log2; first < total; first += step, index += step) {
    float values[kChannels] = {};
    Target target{nullptr, nullptr};
    if (index < total) {
      const int64_t number = quotient(index, params.groups), group = index - number * params.groups;
      const int64_t channel = (group << lanes_log2 | lane) * kChannels;
      const Row row(number, params.extents);
      target = target_of(params, number, row, group, channel);
      const int64_t offset = row.offset(params.x_strides) + channel;
      if (target.codes != nullptr) load_channels(values, params.x + offset * item_bytes(params.type), params.type);
    }
    const float amax = largest_magnitude(values, limit, lanes);
    if (target.codes == nullptr) continue;
    const float scale = scale_of(amax, params.pow2 != 0);
    store_bytes(target.codes, codes_of(values, scale));
    if (lane == 0) *target.scale = scale;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::QuantizeParameters));
