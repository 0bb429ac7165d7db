// One decode step over a paged cache with a relative position bias, for sm_80 and everything after it. How work is
// assigned out: schedule.cuh. The pipeline: storage.cuh. The mathematics: cupymla/ops/xl_paged_attention/README.md.
#include "../../common/entry.cuh"
#include "cache_type.cuh"
#include "merge.cuh"
#include "plain.cuh"
#include "tensor.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "this kernel is for sm_80 and later"
#endif

// CUPYMLA_HEAD_SIZE: 32 to 256. CUPYMLA_ENGINE: 0 plain, 1 tensor cores on rows, 2 tensor cores on pages.
namespace cupymla::xl_paged_attention {

#if CUPYMLA_ENGINE == 0
using ThisConfig = PlainConfig<CUPYMLA_HEAD_SIZE, ThisQuery, ThisCache>;
using ThisEngine = PlainEngine<ThisConfig>;
#else
using ThisConfig = TensorConfig<CUPYMLA_HEAD_SIZE, ThisQuery, ThisCache, CUPYMLA_ENGINE == 2>;
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

  using ThisLine = Line<ThisConfig>;
  using ThisIterator = SegmentIterator<ThisConfig>;
  // The last warp has the fewest tiles.
  const bool in_first_warp = threadIdx.x < 32, in_last_warp = threadIdx.x / 32 == kWarps - 1;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  uint32_t launches = 0;
  if (in_last_warp) {
    if (is_first_lane) launches = take_turn(params.arrivals);
    prefetch_tables(params);
  }
  if (in_first_warp) {
    const Counted counted = ThisLine::count(params);
    const ThisLine line(params, counted.total, counted.even);
    ThisIterator start;
    start.begin(line, counted);
    if (is_first_lane) {
      storage.tiles = line.total;
      storage.even = counted.even;
      storage.iterator[0] = start;
    }
  }
  __syncthreads();
  const auto tidy = [&] {
    if (in_last_warp) {
      const uint32_t launch = launch_of(__shfl_sync(kFullWarp, launches, 0));
      clear_next_set(params.arrivals, launch);
      if (is_first_lane) storage.launch = launch;
    }
    clear_empty<ThisConfig>(params);
  };
  if (!storage.iterator[0].any()) {
    tidy();
    return;
  }
  const ThisLine line(params, storage.tiles, storage.even);
  ThisEngine engine(params, storage, line, storage.iterator[0]);
  tidy();
  bool is_first = true;
  for (int current = 0; storage.iterator[current].any(); current ^= 1) {
    const Segment& segment = storage.iterator[current].segment;
    const Merge<ThisConfig> merge{params, storage, segment, is_first};
    engine.stage_query(segment);
    __syncthreads();
    if (in_last_warp) {
      ThisIterator next = storage.iterator[current];
      next.next(line);
      if (is_first_lane) storage.iterator[current ^ 1] = next;
      merge.prepare();
    }
    engine.attend(segment);
    merge.finish(engine);
    is_first = false;
    const ThisIterator& next = storage.iterator[current ^ 1];
    if (next.any()) engine.ask_query_early(next.segment);
  }
  // Where lengths changed under way, copies may be left that nobody has waited for.
  cupymla::stream_copy_wait<0>();
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::xl_paged_attention::ThisStorage),
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::Parameters),
                     rows = cupymla::xl_paged_attention::ThisConfig::kRows,
                     tile = cupymla::xl_paged_attention::ThisConfig::kTile,
                     merge_batch = cupymla::xl_paged_attention::ThisConfig::kMergeBatch,
                     ctas_per_sm = cupymla::xl_paged_attention::ThisConfig::kCtasPerSm,
                     max_ctas = cupymla::xl_paged_attention::kMaxCtas,
                     arrivals_bytes = cupymla::xl_paged_attention::kArrivalsBytes,
                     buffer_bytes = 4 * cupymla::xl_paged_attention::Merge<
                         cupymla::xl_paged_attention::ThisConfig>::kBufferFloats);
