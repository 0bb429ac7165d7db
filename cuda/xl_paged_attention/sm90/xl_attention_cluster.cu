// One decode step over a paged cache with a relative position bias, for few units: a sequence or two. Clusters share a
// unit, and put their parts together through distributed shared memory: cluster_split.cuh, join.cuh. What a warp does
// with its tiles is that of the kernel for any work (../sm80/tensor.cuh).
#include "../../common/entry.cuh"
#include "../sm80/cache_type.cuh"
#include "join.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "this kernel is for sm_90 and later"
#endif

// CUPYMLA_HEAD_SIZE, CUPYMLA_ENGINE: as for ../sm80/xl_paged_attention.cu, without the plain engine.
namespace cupymla::xl_paged_attention {

using ThisConfig = ClusterConfig<CUPYMLA_HEAD_SIZE, ThisQuery, ThisCache, CUPYMLA_ENGINE == 2>;
using ThisEngine = TensorEngine<ThisConfig>;
using ThisStorage = Storage<ThisConfig>;
using ThisJoin = Join<ThisConfig>;

static_assert((sizeof(ThisStorage) + kSmemPerCta) * ThisConfig::kCtasPerSm <= kSmemPerSm, "shared memory of an SM");

}  // namespace cupymla::xl_paged_attention

extern "C" __global__ void __launch_bounds__(cupymla::xl_paged_attention::kThreads,
                                             cupymla::xl_paged_attention::ThisConfig::kCtasPerSm)
    xl_attention_cluster(const __grid_constant__ cupymla::xl_paged_attention::Parameters params) {
  using namespace cupymla::xl_paged_attention;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);

  const UnitAssignment assignment(params);
  SegmentIterator<ThisConfig> iterator{unit_of<ThisConfig>(params, assignment)};
  const Segment& segment = iterator.segment;
  const Merge<ThisConfig> merge{params, storage, segment, true};
  const ThisJoin join{params, storage, merge, segment, assignment};
  const int32_t count = key_count(params, segment.seq);
  join.expect();
  if (threadIdx.x / 32 == kWarps - 1) ask_for_table(params, assignment, segment);
  // A whole warp goes by the length that one lane has read.
  take_tiles<ThisConfig>(iterator.segment, assignment, __shfl_sync(kFullWarp, count, 0));
  ThisEngine engine(params, storage, Line<ThisConfig>{}, iterator);
  engine.stage_query(segment);
  __syncthreads();
  engine.attend(segment);
  cupymla::stream_copy_wait<0>();  // join.finish writes to the ring, into which no copy may be left under way
  join.finish(engine);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::xl_paged_attention::kThreads, cluster = cupymla::xl_paged_attention::kCluster,
                     smem_bytes = sizeof(cupymla::xl_paged_attention::ThisStorage),
                     parameter_bytes = sizeof(cupymla::xl_paged_attention::Parameters),
                     rows = cupymla::xl_paged_attention::ThisConfig::kRows,
                     tile = cupymla::xl_paged_attention::ThisConfig::kTile,
                     ctas_per_sm = cupymla::xl_paged_attention::ThisConfig::kCtasPerSm,
                     most_clusters = cupymla::xl_paged_attention::ThisJoin::kMostClusters,
                     shared_ctas = cupymla::xl_paged_attention::kSharedCtas,
                     arrivals_bytes = cupymla::xl_paged_attention::kArrivalsBytes +
                                      4 * cupymla::xl_paged_attention::kJoinCounters,
                     buffer_bytes = sizeof(cupymla::xl_paged_attention::ThisConfig::Part));
