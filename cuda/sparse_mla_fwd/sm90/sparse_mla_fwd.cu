// Sparse MLA attention, forward, for Hopper: one CTA per query and block of 64 heads. The pipeline and the barriers are
// drawn in storage.cuh, the mathematics are in cupymla/ops/sparse_mla_fwd/README.md.
#include "../../common/entry.cuh"
#include "../../common/sm90/registers.cuh"
#include "epilogue.cuh"
#include "producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

#if CUPYMLA_FP16
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

namespace cupymla::sparse_mla_fwd {

using ThisConfig = Config<CUPYMLA_D_QK>;
using ThisStorage = Storage<ThisConfig>;

__device__ __forceinline__ void init_barriers(ThisStorage& storage) {
  storage.q_full.init(1);
  for (int buffer = 0; buffer < ThisConfig::kBuffers; ++buffer) {
    for (int part = 0; part < ThisConfig::kParts; ++part) {
      const bool last = part == ThisConfig::kParts - 1;
      storage.full[buffer][part].init(ThisConfig::kWarpgroup + (last ? 4 : 0));
    }
    storage.free[buffer][0].init(4);
    storage.free[buffer][1].init(4);
  }
  fence_mbarrier_init();
}

__device__ __forceinline__ void load_query(ThisStorage& storage, const Query<ThisConfig>& query,
                                           const TensorMap& q_map) {
  storage.q_full.arrive_and_expect(sizeof(storage.q));
  for (int tile = 0; tile < ThisConfig::kKeyTiles; ++tile) {
    tma_load_4d(storage.q[tile], q_map, storage.q_full, tile * ThisConfig::kTileColumns, query.first_head, query.query,
                query.batch);
  }
}

}  // namespace cupymla::sparse_mla_fwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_fwd::ThisConfig::kThreads, 1)
    sparse_mla_fwd(const __grid_constant__ cupymla::TensorMap q_map, const __grid_constant__ cupymla::TensorMap out_map,
                   const __grid_constant__ cupymla::sparse_mla_fwd::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_fwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);

  const Query<ThisConfig> query(params);
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    tma_prefetch_descriptor(out_map);
    init_barriers(storage);
    load_query(storage, query, q_map);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == 2) {
    sm90::registers_give_back<ThisConfig::kProducerRegisters>();
    Producer<ThisConfig>(storage, params, query).run();
  } else if (warpgroup == 0) {
    sm90::registers_take<ThisConfig::kConsumerRegisters>();
    Consumer<ThisConfig, Element, 0> consumer(storage, params);
    consumer.run(query);
    store_output(consumer, query, out_map);
  } else {
    sm90::registers_take<ThisConfig::kConsumerRegisters>();
    Consumer<ThisConfig, Element, 1> consumer(storage, params);
    consumer.run(query);
    store_output(consumer, query, out_map);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_fwd::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_fwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_fwd::Parameters),
                     heads_per_cta = cupymla::sparse_mla_fwd::ThisConfig::kHeads);
