// The indexer's warm-up towards dense attention, for Hopper: stage `dq`, gradients of q and
// weights. gradient_storage.cuh has the barriers and the pipeline.
#include "../../common/entry.cuh"
#include "dq.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_D: channels of an index head, 64 or 128. CUPYMLA_HEADS: heads of a row
// in a column tile, with those that only fill up, 16, 32 or 64.

namespace cupymla::indexer_loss_dense {

struct Dq {
  using Storage = DqStorage;

  static __device__ __forceinline__ void begin(const Parameters&) {}

  static __device__ __forceinline__ void produce(Storage& storage, const TensorMap& heads_map,
                                                 const TensorMap& keys_map, const Parameters& params) {
    GradientProducer<Storage> producer{storage, params, heads_map, keys_map};
    producer.run_dq();
  }

  static __device__ __forceinline__ void consume(Storage& storage, const Parameters& params, int warpgroup_idx) {
    DqConsumer(storage, params, warpgroup_idx).run();
  }
};

}  // namespace cupymla::indexer_loss_dense

extern "C" __global__ void __launch_bounds__(cupymla::indexer_loss_dense::RoleWarpgroups::kThreads, 1)
    indexer_loss_dense_dq(const __grid_constant__ cupymla::TensorMap heads_map,
                          const __grid_constant__ cupymla::TensorMap keys_map,
                          const __grid_constant__ cupymla::indexer_loss_dense::Parameters params) {
  using namespace cupymla::indexer_loss_dense;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  take_roles<Dq>(*reinterpret_cast<Dq::Storage*>(shared_memory), heads_map, keys_map, params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::indexer_loss_dense::RoleWarpgroups::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::indexer_loss_dense::DqStorage),
                     parameter_bytes = sizeof(cupymla::indexer_loss_dense::Parameters),
                     tile_heads = cupymla::indexer_loss_dense::kHeads, tile_rows = cupymla::indexer_loss_dense::kRows,
                     block_keys = cupymla::indexer_loss_dense::kBlockKeys);
