// Keys of the lightning indexer out of a cache's pages: rows of codes, and their scales. Eight lanes have a row, 16
// bytes each. What is computed: `gather_indexer_cache` in cupymla/ops/mla_cache/reference.py.
#include "../../common/entry.cuh"
#include "../../common/math.cuh"
#include "../../common/types.cuh"
#include "floats.cuh"
#include "pages.cuh"
#include "params.cuh"
#include "places.cuh"
#include "rows.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // of a lane
constexpr int kLanes = kIndexerChannels / kBytes;

__device__ __forceinline__ uint4 load_vector(const uint8_t* source) {
  if (is_aligned(source, kBytes)) return __ldg(reinterpret_cast<const uint4*>(source));
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(source);
  return make_uint4(__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3));
}

__device__ __forceinline__ void store_vector(uint8_t* target, uint4 words) {
  if (is_aligned(target, kBytes)) {
    *reinterpret_cast<uint4*>(target) = words;
  } else {
    store_bytes(target, make_uint2(words.x, words.y));
    store_bytes(target + kBytes / 2, make_uint2(words.z, words.w));
  }
}

}  // namespace cupymla::mla_cache

extern "C" __global__ void __launch_bounds__(cupymla::mla_cache::kThreads)
    gather_indexer_cache(const __grid_constant__ cupymla::mla_cache::GatherParameters params) {
  using namespace cupymla;
  using namespace cupymla::mla_cache;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.rows * kLanes; i += step) {
    const int64_t row = i / kLanes;
    const int32_t byte = static_cast<int32_t>(i % kLanes) * kBytes;
    const int64_t slot = params.slots != nullptr
                             ? integer_at(params.slots, row * params.slots_row, params.slots_wide != 0)
                             : slot_of(params, static_cast<int32_t>(row));
    uint4 codes = make_uint4(0u, 0u, 0u, 0u);
    float scale = 0.0f;
    if (slot >= 0 && slot < params.num_slots) {
      const int64_t block = quotient(slot, params.page);
      const IndexerSlot place(block, slot - block * params.page, params.page, params.block_bytes);
      codes = load_vector(params.cache + place.codes + byte);
      if (byte == 0) scale = __ldg(reinterpret_cast<const float*>(params.cache + place.scale));
    }
    store_vector(params.k + row * params.k_row + byte, codes);
    if (byte == 0) params.k_scale[row * params.k_scale_row] = scale;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::GatherParameters));
