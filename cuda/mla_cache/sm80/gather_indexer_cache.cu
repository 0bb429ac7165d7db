// Keys of the lightning indexer out of a cache's pages: rows of codes, and their scales. Eight lanes have a row, 16
// bytes each. What is computed: `gather_indexer_cache` in cupymla/ops/mla_cache/reference.py.
#include "../../common/entry.cuh"
#include "../../common/types.cuh"
#include "floats.cuh"
#include "pages.cuh"
#include "params.cuh"
#include "rows.cuh"

namespace cupymla::mla_cache {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // of a lane
constexpr int kLanes = kIndexerChannels / kBytes;

// Where a request's rows begin, clamped to what there is.
__device__ __forceinline__ int32_t begin_of(const GatherParameters& params, int32_t request) {
  const int32_t given = __ldg(params.cu_lens + request * params.lens_request);
  return static_cast<int32_t>(min(max(static_cast<int64_t>(given), int64_t{0}), params.rows));
}

// The slot of a row by its request's block table; -1 for none. Reads nothing out of the tables, whatever they hold.
__device__ __forceinline__ int64_t slot_of(const GatherParameters& params, int32_t row) {
  // Requests below `low` begin at or before the row, those from `high` on after it.
  int32_t low = 0, high = params.requests;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (begin_of(params, middle) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || row >= begin_of(params, low)) return -1;
  const int32_t position = row - begin_of(params, low - 1);
  const int32_t column = position / params.page;
  if (column >= params.width) return -1;
  const int32_t block =
      __ldg(params.block_tables + (low - 1) * params.tables_request + column * params.tables_block);
  if (block < 0 || block >= params.blocks) return -1;
  return static_cast<int64_t>(block) * params.page + (position - column * params.page);
}

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
      const IndexerSlot place(slot, params.page, params.block_bytes);
      codes = load_vector(params.cache + place.codes + byte);
      if (byte == 0) scale = __ldg(reinterpret_cast<const float*>(params.cache + place.scale));
    }
    store_vector(params.k + row * params.k_row + byte, codes);
    if (byte == 0) params.k_scale[row * params.k_scale_row] = scale;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::mla_cache::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::mla_cache::GatherParameters));
