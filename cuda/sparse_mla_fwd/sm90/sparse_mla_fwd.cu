// Sparse MLA attention, forward, for Hopper: a CTA takes a block of heads of one or several queries. The pipeline
// and the barriers are drawn in storage.cuh and small_head_storage.cuh, the mathematics are in
// cupymla/ops/sparse_mla_fwd/README.md.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "small_head_scores.cuh"
#include "small_head_values.cuh"
#include "merge.cuh"
#include "producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_D_QK: 576 or 512. CUPYMLA_HEADS: heads of a CTA, 64 (many) or 32 or 16 (few). CUPYMLA_FP16: 1 for fp16, 0
// for bf16. CUPYMLA_ANY_SCALE: 1 where sm_scale may be zero, negative or tiny, which costs a multiplication per score;
// 0 where it is surely positive in fp32. CUPYMLA_SPLIT: 1 where the CTAs of each cluster of the small-head variant
// share the entries of one query.

namespace cupymla::sparse_mla_fwd {

#if CUPYMLA_HEADS == 64
static_assert(!CUPYMLA_SPLIT, "few heads have less to merge");
using ThisConfig = ManyHeads<CUPYMLA_D_QK>;
#else
using ThisConfig = SmallHead<CUPYMLA_D_QK, CUPYMLA_HEADS, CUPYMLA_SPLIT>;
#endif
using ThisStorage = Storage<ThisConfig>;

// Half of the work of the small-head variant.
template <int kWarpgroupIdx, typename Half, typename Config>
__device__ __forceinline__ void finish_queries(Half& half, const WorkAssignment<Config>& work) {
  for (uint32_t token = work.token; token < work.end; ++token) {
    half.accumulate();
    const Query query(half.params, token);
    if constexpr (Config::kSplit) {
      half.leave();
      merge_parts<Element>(half.storage, half.params, query, work, kWarpgroupIdx);
    } else {
      half.store_result(query);
    }
  }
}

// Where heads are many both consumers do the same work, where they are few the first has the scores, the second the
// values.
template <typename Config, int kWarpgroupIdx>
__device__ __forceinline__ void consume(Storage<Config>& storage, const Parameters& params) {
  const WorkAssignment<Config> work(params);
  if constexpr (!Config::kSmallHead) {
    Consumer<Config, Element, kWarpgroupIdx, CUPYMLA_ANY_SCALE> consumer(storage, params, work.first_head);
    for (uint32_t token = work.token; token < work.end; ++token) {
      consumer.accumulate();
      store_output(consumer, Query(params, token));
      consumer.q_parity ^= 1u;
    }
  } else if constexpr (kWarpgroupIdx == 0) {
    Scores<Config, Element, CUPYMLA_ANY_SCALE> scores(storage, params, work.first_head);
    finish_queries<kWarpgroupIdx>(scores, work);
  } else {
    Values<Config, Element> values(storage, params, work.first_head);
    finish_queries<kWarpgroupIdx>(values, work);
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

  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    storage.init();
    if constexpr (CUPYMLA_SPLIT != 0) {
      // The pages of results, which few queries' calls would look up when all else is done.
      prefetch_l2(params.out);
      prefetch_l2(params.lse);
    }
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == 2) {
    warpgroup_reg_dealloc<ThisConfig::kProducerRegisters>();
    Producer<ThisConfig>(storage, params, q_map).run(WorkAssignment<ThisConfig>(params));
  } else if (warpgroup == 0) {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters[0]>();
    consume<ThisConfig, 0>(storage, params);
  } else {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters[1]>();
    consume<ThisConfig, 1>(storage, params);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_fwd::ThisConfig::kThreads,
                     cluster = cupymla::sparse_mla_fwd::ThisConfig::kMaxCluster,
                     smem_bytes = sizeof(cupymla::sparse_mla_fwd::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_fwd::Parameters),
                     heads_per_cta = cupymla::sparse_mla_fwd::ThisConfig::kHeads,
                     warpgroup_registers = cupymla::sparse_mla_fwd::ThisConfig::kWarpgroupRegisters);
