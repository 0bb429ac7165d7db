// Block-scaled 4-bit matrix times 1 to 16 vectors, for sm_80 and up: a stream through shared memory. The barriers are
// listed in storage.cuh, the mathematics are in cupymla/ops/nvfp4_gemv/README.md.
#include "../../common/entry.cuh"
#include "epilogue.cuh"
#include "stream.cuh"

// CUPYMLA_MXFP4: 1 for MXFP4, 0 for NVFP4. CUPYMLA_VECTORS: what b holds, 0 E2M1, 1 bfloat16, 2 float16.
// CUPYMLA_MOST_COLUMNS: the largest n, 1, 8 or 16.
namespace cupymla::nvfp4_gemv {

using ThisConfig =
    Config<CUPYMLA_MXFP4 != 0, static_cast<Vectors>(CUPYMLA_VECTORS), CUPYMLA_MOST_COLUMNS>;
using ThisStorage = Storage<ThisConfig>;

constexpr int kMostGroups = 1 << Pass<ThisConfig>::kMostGroupsLog2;
static_assert(kVectorBytes<ThisConfig> / kMostGroups >=
                      ThisConfig::kMostColumns * (ThisConfig::kChunk * 2 + ThisConfig::kRowScales * 4 + 80) &&
                  VectorPieces<ThisConfig>::kPhaseElements >=
                      ThisConfig::kMostColumns * ThisConfig::kChunk * kMostGroups,
              "b of a chunk has to fit for each group");

constexpr int kPhaseElements = VectorPieces<ThisConfig>::kPhaseElements;

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::ThisConfig::kThreads, 1)
    nvfp4_gemv(const __grid_constant__ cupymla::nvfp4_gemv::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::nvfp4_gemv;
  using C = ThisConfig;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const int32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int32_t lane = threadIdx.x % 32;

  Passes<C> passes(params);
  if (passes.done()) return;
  if constexpr (C::kScaling == Scaling::columns) {
    if (threadIdx.x < sizeof(storage.zeros) / 16) {
      reinterpret_cast<uint4*>(storage.zeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
    }
  }
  const int32_t chunks = chunks_of(params, C::kChunk);
  const int32_t phase_chunks = static_cast<int32_t>(params.phase_chunks);
  const bool one_phase = chunks <= phase_chunks;
  // b comes first: whatever is asked for behind the stream's stages waits for them.
  const Pass<C> opening = passes.get();
  VectorLoader<C> loader(storage, params, warp);
  loader.fetch(opening, 0);
  if (!one_phase || params.items > gridDim.x) prefetch_vectors<C>(params);
  // Half of the warps are through with theirs before the others begin, so that the last bytes are not everybody's.
  const bool second_half = warp >= C::kWarps / 2;
  Stream<C> stream(storage, params, passes, opening, warp, lane);
#pragma unroll 1
  for (int stage = 0; stage < C::kStages; ++stage) {
    if (stage == (second_half ? 0 : 1)) named_barrier_sync(kTurnBarrier, C::kThreads);
    stream.copy_next();
  }

  Product<C> product(storage, params, warp, lane);
  int32_t buffer = 1;
  while (!passes.done()) {
    const Pass<C> pass = passes.get();
    passes.next();
    const int32_t tile = pass.tile_of(warp);
    const bool idle = tile * pass.tile_rows >= pass.rows;
    int32_t chunk = idle ? chunks : pass.split_of(warp);
    product.clear();
    for (int32_t first = 0; first < chunks; first += phase_chunks) {
      const int32_t end = min(first + phase_chunks, chunks);
      if (loader.holds()) {
        buffer ^= 1;
        loader.store(pass, buffer);
        product.use(pass, buffer);
      }
      Pass<C> coming = pass;
      bool wanted = end < chunks;
      if (!wanted && !passes.done()) {
        coming = passes.get();
        wanted = !one_phase || coming.batch != pass.batch || coming.groups_log2 != pass.groups_log2;
      }
      if (wanted) loader.fetch(coming, end < chunks ? end : 0);
      named_barrier_sync(kGroupBarriers + pass.group_of(warp), pass.group_threads());
      const auto multiply = [&] {
        stream_copy_wait<C::kStages - 1>();
        __syncwarp();
        product.add(stream.stage(), (chunk - first) >> pass.groups_log2);
        __syncwarp();
        chunk += pass.splits;
      };
      while (chunk < end) {
#pragma unroll 1
        for (; chunk < end && stream.plain(); stream.copy_plain()) multiply();
        if (chunk < end) {
          multiply();
          stream.copy_next();
        }
      }
    }
    product.finish();
    keep_sums(storage, product, warp, lane);
    __syncthreads();
    write_pass(storage, params, pass);
    if (!passes.done()) __syncthreads();
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = cupymla::nvfp4_gemv::ThisConfig::kSharedBytes,
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::Parameters),
                     vector_bytes = cupymla::nvfp4_gemv::kVectorBytes<cupymla::nvfp4_gemv::ThisConfig>,
                     factor_bytes = cupymla::nvfp4_gemv::kFactorBytes<cupymla::nvfp4_gemv::ThisConfig>,
                     phase_elements = cupymla::nvfp4_gemv::kPhaseElements,
                     chunk = cupymla::nvfp4_gemv::ThisConfig::kChunk, block = cupymla::nvfp4_gemv::ThisConfig::kBlock,
                     pass_rows = cupymla::nvfp4_gemv::ThisConfig::kPassRows,
                     groups = cupymla::nvfp4_gemv::kMostGroups);
