// The indexer's warm-up towards dense attention, for Hopper: a launch for each stage of a row block. README.md has the
// stages and the roofline, teacher_storage.cuh and gradient_storage.cuh the barriers and pipelines.
#include "../../common/entry.cuh"
#include "config.cuh"
#include "dk.cuh"
#include "dq.cuh"
#include "keys.cuh"
#include "teacher.cuh"
#include "teacher_producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

namespace cupymla::indexer_loss_dense {

constexpr bool kIsTeacher = kStage == kLse || kStage == kTarget;
constexpr bool kByRows = kStage == kMask || kStage == kRowLoss || kStage == kRound;
constexpr int kThreads = kByRows ? kRowThreads : GradientWarpgroups::kThreads;

using Storage = conditional_t<kIsTeacher, TeacherStorage, conditional_t<kStage == kDq, DqStorage, DkStorage>>;

// Where a CTA of a grid over blocks of keys, then over parts of the rows, works.
struct Place {
  int32_t first_key, part;

  __device__ __forceinline__ explicit Place(const Parameters& params) {
    const int32_t blocks = static_cast<int32_t>(params.row_stride / kBlockKeys);
    first_key = static_cast<int32_t>(blockIdx.x) % blocks * kBlockKeys;
    part = static_cast<int32_t>(blockIdx.x) / blocks;
  }
};

template <typename Storage>
__device__ __forceinline__ void produce(Storage& storage, const TensorMap& heads_map, const TensorMap& keys_map,
                                        const Parameters& params) {
  const Place place(params);
  if constexpr (is_same_v<Storage, TeacherStorage>) {
    TeacherProducer producer{storage, params, heads_map, keys_map};
    if constexpr (kStage == kLse) producer.run_lse();
    if constexpr (kStage == kTarget) producer.run_target(place.first_key, place.part * params.chunk_rows);
  } else {
    GradientProducer<Storage> producer{storage, params, heads_map, keys_map};
    if constexpr (is_same_v<Storage, DqStorage>) producer.run_dq();
    if constexpr (is_same_v<Storage, DkStorage>) producer.run_dk(place.first_key, place.part * params.slice_rows);
  }
}

template <typename Storage>
__device__ __forceinline__ void consume(Storage& storage, const Parameters& params, int warpgroup_idx) {
  const Place place(params);
  if constexpr (is_same_v<Storage, TeacherStorage>) {
    TeacherConsumer consumer(storage, params, warpgroup_idx);
    if constexpr (kStage == kLse) consumer.run_lse();
    if constexpr (kStage == kTarget) consumer.run_target(place.first_key);
  }
  if constexpr (is_same_v<Storage, DqStorage>) DqConsumer(storage, params, warpgroup_idx).run();
  if constexpr (is_same_v<Storage, DkStorage>) {
    DkConsumer(storage, params, warpgroup_idx).run(place.first_key, place.part);
  }
}

}  // namespace cupymla::indexer_loss_dense

extern "C" __global__ void __launch_bounds__(cupymla::indexer_loss_dense::kThreads, 1)
    indexer_loss_dense(const __grid_constant__ cupymla::TensorMap heads_map,
                       const __grid_constant__ cupymla::TensorMap keys_map,
                       const __grid_constant__ cupymla::indexer_loss_dense::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::indexer_loss_dense;
  if constexpr (kStage == kMask) mask_keys(params);
  if constexpr (kStage == kRowLoss) RowLoss{params}.run();
  if constexpr (kStage == kRound) round(params);
  if constexpr (!kByRows) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
    if (threadIdx.x == 0) {
      tma_prefetch_descriptor(heads_map);
      tma_prefetch_descriptor(keys_map);
      init_barriers(storage);
      if (kStage == kTarget && blockIdx.x == 0) *params.largest_term = 0.0f;
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == kConsumers) {
      warpgroup_reg_dealloc<GradientWarpgroups::kProducerRegisters>();
      if (threadIdx.x / 32 % 4 == 0) produce(storage, heads_map, keys_map, params);
    } else {
      warpgroup_reg_alloc<GradientWarpgroups::kConsumerRegisters>();
      consume(storage, params, warpgroup);
    }
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_loss_dense::kThreads, cluster = 1,
                     smem_bytes = cupymla::indexer_loss_dense::kByRows
                                      ? 0
                                      : sizeof(cupymla::indexer_loss_dense::Storage),
                     parameter_bytes = sizeof(cupymla::indexer_loss_dense::Parameters),
                     tile_heads = cupymla::indexer_loss_dense::kHeads, tile_rows = cupymla::indexer_loss_dense::kRows,
                     block_keys = cupymla::indexer_loss_dense::kBlockKeys);
