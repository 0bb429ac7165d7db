// Block-scaled 4-bit matrix times 1 to 16 vectors, for sm_80 and up: a stream through shared memory. The barriers are
// listed in storage.cuh, the mathematics are in cupymla/ops/nvfp4_gemv/README.md.
#include "../../common/entry.cuh"
#include "any.cuh"
#include "whole.cuh"

// CUPYMLA_MXFP4: 1 for MXFP4, 0 for NVFP4. CUPYMLA_VECTORS: what b holds, 0 E2M1, 1 bfloat16, 2 float16.
// CUPYMLA_MOST_COLUMNS: the largest n, 1, 8 or 16. CUPYMLA_WHOLE: 0 for any call, else for whole ones
// alone (whole.cuh), 1 with scales of a by rows, 2 by words.
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
  extern __shared__ __align__(128) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const int32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int32_t lane = threadIdx.x % 32;
  if constexpr (CUPYMLA_WHOLE != 0) {
    multiply_whole<ThisConfig, CUPYMLA_WHOLE == 1>(storage, params, warp, lane);
  } else {
    multiply_any(storage, params, warp, lane);
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
