// Sparse MLA attention over paged caches, for Hopper: a cluster of CTAs takes a block of heads of one row, each CTA
// some of the row's entries, and puts the parts together. Or several clusters share the entries, and
// sparse_mla_decode_merge.cu ends the row (shares.cuh). Consumers, pipelines and barriers are those of the forward
// (../../sparse_mla_fwd/sm90/storage.cuh, small_head_storage.cuh), but for own_share.cuh; the producer is this
// operator's own.
#include "../../common/element.cuh"
#include "../../common/entry.cuh"
#include "../../common/memory.cuh"
#include "../../common/registers.cuh"
#include "leave.cuh"
#include "left_producer.cuh"
#include "own_share.cuh"
#include "shares.cuh"
#include "shared_producer.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "this kernel is for sm_90a"
#endif

// CUPYMLA_FORMAT: of the caches, see cache.cuh. CUPYMLA_D_QK: 576 or 512. CUPYMLA_HEADS: heads of a CTA, 64, 32 or 16.
// CUPYMLA_FP16: 1 for fp16 queries, 0 for bf16. CUPYMLA_SHARERS: CTAs that bring in rows for each other, 1 or with 64
// heads 2.

namespace cupymla::sparse_mla_decode {

using ThisCache = CacheFormat<static_cast<Format>(CUPYMLA_FORMAT), CUPYMLA_D_QK>;

#if CUPYMLA_HEADS == 64
using ThisConfig = ManyHeads<CUPYMLA_D_QK, CUPYMLA_SHARERS, CUPYMLA_SHARERS == 1 && folds<ThisCache, Element>()>;
#else
using ThisConfig = SmallHead<CUPYMLA_D_QK, CUPYMLA_HEADS>;
#endif
using ThisStorage = sparse_mla_fwd::Storage<ThisConfig>;
using ThisWork = sparse_mla_fwd::WorkAssignment<ThisConfig>;

// Scores may be multiplied by any number, which costs a multiplication of each.
constexpr bool kAnyScale = true;

// Code that has not run yet is waited for, some 12 cycles an instruction, and all wait for the producer's first block.
// The second consumer has nothing to do until then: while rows come it rehearses, which is to go through the code of a
// block without any effect, a wait or a shuffle among its own lanes aside.
constexpr bool kRehearses = folds<ThisCache, Element>();
constexpr uint32_t kRehearsed = 5;  // named barrier

// How many entries of each source count, of a CTA's n-th row.
__device__ __forceinline__ int32_t* counts_of(ThisStorage& storage, uint32_t row) {
  static_assert(sizeof(storage.counts) >= ThisConfig::kMostRows * 2 * sizeof(int32_t));
  return &storage.counts[0][0] + row * 2;
}

// Of fp16 rows, new for each: ptxas (12.9) spills where it keeps all addresses of a block for the next row.
__device__ __forceinline__ ThisStorage& in_this_row(ThisStorage& storage) {
  if constexpr (!is_same_v<Element, __half>) return storage;
  int64_t address = reinterpret_cast<int64_t>(&storage);
  make_opaque(address);
  return *reinterpret_cast<ThisStorage*>(address);
}

template <typename Config, typename Work>
__device__ __forceinline__ void produce(ThisStorage& all_rows, const Parameters& params, const TensorMap& q_map,
                                        const Work& work, bool rehearses) {
  const int32_t counted = rehearses ? 0 : ~0;  // bits of the counts: a rehearsal has no entries
  sparse_mla_fwd::Producer<Config> of_query(all_rows, params, q_map);
  Phases phases;
  uint32_t token = work.token;
#pragma unroll 1
  do {
    ThisStorage& storage = in_this_row(all_rows);
    const int32_t* counts = counts_of(storage, token - work.token);
    const Entries entries(counts[0] & counted, counts[1] & counted, part_of_row(work), parts_of_row(work));
    sparse_mla_fwd::Selection<Config> selection(params, token);
    selection.blocks = entries.end - entries.begin;
    if (Config::kMostRows > 1 && !rehearses && token + 1 < work.end) {
      prefetch_indices(params, sparse_mla_fwd::Query(params, token + 1), part_of_row(work), parts_of_row(work));
    }
    const auto load_query = [&] {
      if constexpr (Config::kSmallHead) {
        of_query.load_query_as_block(selection, work.first_head);
      } else {
        of_query.load_query(selection, work.first_head);
        of_query.gather.phases.advance(of_query.kQuery);
      }
      return of_query.state;
    };
    if constexpr (Config::kConsumersConvert) {
      LeftProducer<Config, ThisCache, Element>(storage, params, selection, entries, rehearses).run(load_query, phases);
    } else if constexpr (Config::kSharers == 1) {
      Producer<Config, ThisCache, Element>(storage, params, selection, entries, rehearses).run(load_query, phases);
    } else {
      SharedProducer<Config, ThisCache, Element>(storage, params, selection, entries, rehearses)
          .run(load_query, phases);
    }
  } while (Config::kMostRows > 1 && !rehearses && ++token < work.end);
}

// A consumer's entries of each row, then the end of the row: a CTA that has all of it writes the result. Of a row that
// clusters share, each is one CTA, or two with heads of their own.
template <int kWarpgroupIdx, typename Half, typename Work>
__device__ __forceinline__ void attend(Half&& half, const Parameters& params, const Work& work) {
  uint32_t token = work.token;
  if constexpr (ThisConfig::kMostRows > 1) {
#pragma unroll 1
    for (;; ++token) {
      half.accumulate();
      if (work.parts > 1 || gridDim.y > 1) break;
      const bool last = token + 1 >= work.end;
      // Nobody leaves while the other may still free a buffer for it. Ahead of the result, which it would wait for.
      if (ThisConfig::kSharers > 1 && last) cluster_arrive();
      store_whole(half, sparse_mla_fwd::Query(params, token));
      if (last) {
        if constexpr (ThisConfig::kSharers > 1) cluster_wait();
        return;
      }
      half.q_parity ^= 1u;
    }
  } else {
    half.accumulate();
  }
  const sparse_mla_fwd::Query query(params, token);
  if (work.parts == 1) {
    if constexpr (ThisConfig::kSharers > 1) cluster_arrive();
    if (ThisConfig::kMostRows == 1 && gridDim.y == 1) {
      store_whole(half, query);
    } else {
      griddepcontrol_launch_dependents();
      store_share(half, PartialResult{params, token});
    }
    if constexpr (ThisConfig::kSharers > 1) cluster_wait();
  } else {
    leave(half);
    sparse_mla_fwd::merge_parts<Element>(half.storage, params, query, work, kWarpgroupIdx);
  }
}

template <typename Config, int kWarpgroupIdx, typename Storage, typename Work>
__device__ __forceinline__ void consume(Storage& storage, const Parameters& params, const Work& work) {
  using namespace sparse_mla_fwd;
  if constexpr (!Config::kSmallHead) {
    attend<kWarpgroupIdx>(Consumer<Config, Element, kWarpgroupIdx, kAnyScale>(storage, params, work.first_head),
                          params, work);
  } else if constexpr (kWarpgroupIdx == 0) {
    attend<kWarpgroupIdx>(Scores<Config, Element, kAnyScale>(storage, params, work.first_head), params, work);
  } else {
    attend<kWarpgroupIdx>(Values<Config, Element>(storage, params, work.first_head), params, work);
  }
}

// What a consumer does before the scores of its own block.
template <typename Config, typename E, int kWarpgroupIdx, bool kAny>
__device__ __forceinline__ void convert_own_block(sparse_mla_fwd::Consumer<Config, E, kWarpgroupIdx, kAny>& consumer) {
  const sparse_mla_fwd::Query query(consumer.params, 0);
  OwnShare<Config, ThisCache, E>(static_cast<sparse_mla_fwd::Storage<Config>&>(consumer.storage),
                                 static_cast<const Parameters&>(consumer.params), query)
      .run(kWarpgroupIdx, consumer.k_parity);
}

}  // namespace cupymla::sparse_mla_decode

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_decode::ThisConfig::kThreads, 1)
    sparse_mla_decode(const __grid_constant__ cupymla::TensorMap q_map,
                      const __grid_constant__ cupymla::sparse_mla_decode::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::sparse_mla_decode;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  ThisStorage& storage = *reinterpret_cast<ThisStorage*>(shared_memory);
  const ThisWork work(params);

  const sparse_mla_fwd::Query query(params, work.token);
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(q_map);
    storage.init();
  }
  if (threadIdx.x == 32) {
    read_entries(params, query, counts_of(storage, 0));
#pragma unroll 1
    for (uint32_t row = 1; row < min(work.end - work.token, ThisConfig::kMostRows); ++row) {
      read_entries(params, sparse_mla_fwd::Query(params, work.token + row), counts_of(storage, row));
    }
  }
  if (threadIdx.x == 64) {
    // The pages of results, which few rows' calls would look up when all else is done.
    prefetch_l2(params.out);
    prefetch_l2(params.lse);
  }
  if (threadIdx.x >= 2 * ThisConfig::kWarpgroup) {
    prefetch_indices(params, query, part_of_row(work), parts_of_row(work));
  }
  if constexpr (ThisConfig::kSharers == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
    // CTAs that wait for each other go by what one of them has read. A consumer: they leave last, and together.
    if (threadIdx.x < 2 * (work.end - work.token) && (asked_rank() & 1u) != 0) {
      int32_t& count = counts_of(storage, 0)[threadIdx.x];
      count = cluster_load_int32(cluster_address(smem_address(&count), asked_rank() - 1u));
    }
    __syncthreads();
  }

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ThisConfig::kWarpgroup, 0);
  if (warpgroup == 2 || (kRehearses && warpgroup == 1)) {
    warpgroup_reg_dealloc<ThisConfig::kProducerRegisters>();
    produce<ThisConfig>(storage, params, q_map, work, warpgroup != 2);
    // All warps of a warpgroup are to meet between two changes of its registers (PTX ISA, "setmaxnreg").
    if (warpgroup != 2) named_barrier_sync(kRehearsed, ThisConfig::kWarpgroup);
  }
  if (warpgroup == 2) return;
  if (warpgroup == 0) {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters[0]>();
    consume<ThisConfig, 0>(storage, params, work);
  } else {
    warpgroup_reg_alloc<ThisConfig::kConsumerRegisters[1]>();
    consume<ThisConfig, 1>(storage, params, work);
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_decode::ThisConfig::kThreads,
                     cluster = cupymla::sparse_mla_decode::ThisConfig::kMaxCluster,
                     smem_bytes = sizeof(cupymla::sparse_mla_decode::ThisStorage),
                     parameter_bytes = sizeof(cupymla::sparse_mla_decode::Parameters),
                     heads_per_cta = cupymla::sparse_mla_decode::ThisConfig::kHeads,
                     most_rows = cupymla::sparse_mla_decode::ThisConfig::kMostRows,
                     warpgroup_registers = cupymla::sparse_mla_decode::ThisConfig::kWarpgroupRegisters);
