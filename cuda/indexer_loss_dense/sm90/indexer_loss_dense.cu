// The indexer's warm-up towards dense attention, for Hopper: stage `target`, sums over MLA heads.
// README.md has the stages and the roofline, teacher_storage.cuh the barriers and the pipeline.
#include "../../common/entry.cuh"
#include "teacher.cuh"
#include "teacher_producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_D_QK: channels of an MLA head, 576 or 512. CUPYMLA_HEADS: heads of a
// row in a column tile, with those that only fill up, 16, 32 or 64.

namespace cupymla::indexer_loss_dense {

struct Target {
  using Storage = TeacherStorage;

  static __device__ __forceinline__ void begin(const Parameters& params) {
    if (blockIdx.x == 0) *params.largest_term = 0.0f;
  }

  static __device__ __forceinline__ void produce(Storage& storage, const TensorMap& heads_map,
                                                 const TensorMap& keys_map, const Parameters& params) {
    const Place place(params);
    TeacherProducer producer{storage, params, heads_map, keys_map};
    producer.run_target(place.first_key, place.part * params.chunk_rows);
  }

  static __device__ __forceinline__ void consume(Storage& storage, const Parameters& params, int warpgroup_idx) {
    const Place place(params);
    TeacherConsumer consumer(storage, params, warpgroup_idx);
    consumer.run_target(place.first_key);
  }
};

}  // namespace cupymla::indexer_loss_dense

extern "C" __global__ void __launch_bounds__(cupymla::indexer_loss_dense::TeacherConfig::kThreads, 1)
    indexer_loss_dense(const __grid_constant__ cupymla::TensorMap heads_map,
                       const __grid_constant__ cupymla::TensorMap keys_map,
                       const __grid_constant__ cupymla::indexer_loss_dense::Parameters params) {
  using namespace cupymla::indexer_loss_dense;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  take_roles<Target>(*reinterpret_cast<Target::Storage*>(shared_memory), heads_map, keys_map, params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_loss_dense::TeacherConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::indexer_loss_dense::TeacherStorage),
                     parameter_bytes = sizeof(cupymla::indexer_loss_dense::Parameters),
                     tile_heads = cupymla::indexer_loss_dense::kHeads, tile_rows = cupymla::indexer_loss_dense::kRows,
                     block_keys = cupymla::indexer_loss_dense::kBlockKeys);
