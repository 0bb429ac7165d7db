// Sparse MLA attention, forward, for Hopper: a CTA takes a block of 64 heads of one or several queries. The pipeline
// and the barriers are drawn in storage.cuh, the mathematics are in cupymla/ops/sparse_mla_fwd/README.md.
#include "../../common/entry.cuh"
#include "../../common/sm90/registers.cuh"
#include "epilogue.cuh"
#include "producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_FP16: 1 for fp16, 0 for bf16. CUPYMLA_ANY_SCALE: 1 where sm_scale may be zero,
// negative or tiny, which costs a multiplication per score; 0 where it is surely positive in fp32.
#if CUPYMLA_FP16
using Element = __half;
#else
using Element = __nv_bfloat16;
#endif

namespace cupymla::sparse_mla_fwd {

using ThisConfig = Config<CUPYMLA_D_QK>;
using ThisStorage = Storage<ThisConfig>;

__device__ __forceinline__ void init_barriers(ThisStorage& storage) {
  constexpr uint32_t kEveryThread = ThisConfig::kWarpgroup;
  storage.q_full.init(1);
  storage.q_free.init(kEveryThread * ThisConfig::kConsumers);
  storage.base_ready.init(kEveryThread);
  for (int consumer = 0; consumer < ThisConfig::kConsumers; ++consumer) {
    storage.p_ready[consumer].init(kEveryThread);
    storage.statistics_ready[consumer].init(kEveryThread);
  }
  for (int buffer = 0; buffer < ThisConfig::kBuffers; ++buffer) {
    for (int part = 0; part < ThisConfig::kParts; ++part) {
      const bool last = part == ThisConfig::kParts - 1;
      storage.full[buffer][part].init(kEveryThread + (last ? 4 : 0));
    }
    storage.free[buffer][0].init(kEveryThread);
    storage.free[buffer][1].init(kEveryThread);
  }
  fence_mbarrier_init();
}

template <int kWho>
__device__ __forceinline__ void consume(ThisStorage& storage, const Parameters& params,
                                        const Share<ThisConfig>& share) {
  Consumer<ThisConfig, Element, kWho, CUPYMLA_ANY_SCALE> consumer(storage, params, share.first_head);
  for (uint32_t token = share.token; token < share.end; ++token) {
    const Query<ThisConfig> query(params, token);
    consumer.accumulate(query);
    store_output(consumer, query);
    consumer.q_parity ^= 1u;
  }
}

}  // namespace cupymla::sparse_mla_fwd

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_fwd::ThisConfig::kThreads, 1)
    sparse_mla_fwd(const __grid_constant__ cupymla::TensorMap q_map,
                   const __grid_constant__ cupymla::sparse_mla_fwd::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_fwd;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);

  const Share<ThisConfig> share(params);
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    init_barriers(storage);
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == 2) {
    sm90::registers_give_back<ThisConfig::kProducerRegisters>();
    Producer<ThisConfig>(storage, params, q_map).run(share);
  } else if (warpgroup == 0) {
    sm90::registers_take<ThisConfig::kConsumerRegisters>();
    consume<0>(storage, params, share);
  } else {
    sm90::registers_take<ThisConfig::kConsumerRegisters>();
    consume<1>(storage, params, share);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_fwd::ThisConfig::kThreads, cluster = 1,
                     smem_bytes = sizeof(cupymla::sparse_mla_fwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_fwd::Parameters),
                     heads_per_cta = cupymla::sparse_mla_fwd::ThisConfig::kHeads);
