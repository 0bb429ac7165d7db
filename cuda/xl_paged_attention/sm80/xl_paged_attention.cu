// One decode step over a paged cache with a relative position bias, for sm_80 and everything after it. How work is
// dealt out: schedule.cuh. The pipeline: storage.cuh. The mathematics: cupymla/ops/xl_paged_attention/README.md.
#include "../../common/entry.cuh"
#include "merge.cuh"
#include "plain.cuh"
#include "tensor.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "this kernel is for sm_80 and later"
#endif

// CUPYMLA_HEAD_SIZE: 32 to 256. CUPYMLA_QUERY: 32 for fp32, 16 for fp16, 0 for bf16. CUPYMLA_CACHE: 0 for the query's
// dtype, 43 for e4m3, 52 for e5m2. CUPYMLA_ENGINE: 0 plain, 1 tensor cores on rows, 2 tensor cores on pages.
#if CUPYMLA_QUERY == 32
using Query = float;
#elif CUPYMLA_QUERY == 16
using Query = __half;
#else
using Query = __nv_bfloat16;
#endif

#if CUPYMLA_CACHE == 43
using Cache = cupymla::E4m3;
#elif CUPYMLA_CACHE == 52
using Cache = cupymla::E5m2;
#else
using Cache = Query;
#endif

namespace cupymla::xl_paged_attention {

#if CUPYMLA_ENGINE == 0
using ThisConfig = PlainConfig<CUPYMLA_HEAD_SIZE, Query, Cache>;
using ThisEngine = PlainEngine<ThisConfig>;
#else
using ThisConfig = TensorConfig<CUPYMLA_HEAD_SIZE, Query, Cache, CUPYMLA_ENGINE == 2>;
using ThisEngine = TensorEngine<ThisConfig>;
#endif
using ThisStorage = Storage<ThisConfig>;

static_assert((sizeof(ThisStorage) + kSmemPerCta) * ThisConfig::kCtasPerSm <= kSmemPerSm, "shared memory of an SM");

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kThreads,
                                             cupymla::xl_paged_attention::ThisConfig::kCtasPerSm)
    xl_paged_attention(const __grid_constant__ cupymla::xl_paged_attention::Parameters params) {
  using namespace cupymla::xl_paged_attention;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);

  prefetch_tables(params);
  const Line<ThisConfig::kTile> line(params);
  Walk<ThisConfig::kTile> start;
  start.begin(line);
  ThisEngine engine(params, storage, line, start);
  Walk<ThisConfig::kTile>& walk = storage.walk[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) walk = start;
  __syncwarp();
  clear_empty<ThisConfig>(params);
  while (walk.any()) {
    const int32_t first_row = walk.segment.unit % params.row_blocks * ThisConfig::kRows;
    const int32_t first_head = walk.segment.unit / params.row_blocks * params.group + first_row;
    const int32_t rows = min(ThisConfig::kRows, params.group - first_row);
    engine.attend(walk.segment, first_head, rows);
    Merge<ThisConfig>{params, storage, line, walk.segment, first_head, rows}.finish(engine);
    if (threadIdx.x % 32 == 0) walk.next(line);
    __syncwarp();
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::xl_paged_attention::ThisStorage),
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::Parameters),
                     rows = cupymla::xl_paged_attention::ThisConfig::kRows,
                     tile = cupymla::xl_paged_attention::ThisConfig::kTile,
                     merge_batch = cupymla::xl_paged_attention::ThisConfig::kMergeBatch,
                     ctas_per_sm = cupymla::xl_paged_attention::ThisConfig::kCtasPerSm,
                     slot_bytes = 4 * cupymla::xl_paged_attention::Merge<
                         cupymla::xl_paged_attention::ThisConfig>::kSlotFloats);
