// What workers of the small-head variant bring out after the last block: dQ and the sink's term.
#pragma once

#include "small_head_workers.cuh"

namespace cupymla::sparse_mla_bwd {

// What this query adds to d_sink, by the first CTA's first workers; nothing where no entry was valid.
template <typename Config, typename Element>
__device__ __forceinline__ void store_sink_terms(const SmallHeadWorker<Config, Element>& worker,
                                                 const QueryPosition& query) {
  const Parameters& params = worker.params;
  const auto& storage = worker.storage;
  const int head = worker.row;
  if (params.sink_terms == nullptr || worker.rank != 0 || worker.group != 0 || head >= params.h_q) return;
  store_sink_term(params, query, head, worker.occupied, storage.delta[0][head] + storage.delta[1][head]);
}

// A channel of dQ for all heads, rounded, from this thread's lane of Tensor Memory to a column of shared memory.
template <typename Config, typename Element>
__device__ __forceinline__ void stage_channel(uint8_t* column, uint32_t address, bool wanted) {
  constexpr int kRow = SmallHeadStorage<Config>::kQueryGradientRow;
  uint32_t values[Config::kHeads];
  sm100::tmem_load(values, address);
  sm100::wait_loads();
  if (!wanted) return;
#pragma unroll
  for (int head = 0; head < Config::kHeads; head += 2) {
    const uint32_t pair = pack_pair<Element>(__uint_as_float(values[head]), __uint_as_float(values[head + 1]));
    *reinterpret_cast<uint16_t*>(column + head * kRow) = static_cast<uint16_t>(pair);
    *reinterpret_cast<uint16_t*>(column + (head + 1) * kRow) = static_cast<uint16_t>(pair >> 16);
  }
}

// dQ of this CTA's channels. `computed`: whether there was a block; all its products are done then.
template <typename Config, typename Element>
__device__ __forceinline__ void store_query_gradient(const SmallHeadWorker<Config, Element>& worker,
                                                     const QueryPosition& query, bool computed) {
  constexpr int kRow = SmallHeadStorage<Config>::kQueryGradientRow;
  constexpr int kOwnBytes = Config::kOwnTiles * static_cast<int>(kSwizzleRowBytes);
  const Parameters& params = worker.params;
  uint8_t* staged = worker.storage.k[0];
  const bool has_rope = Config::kHasRope && worker.rank == 0;
  if (computed) {
    sm100::fence_after_sync();
    const int channel = worker.group * 2 * Config::kTileColumns + worker.row;
    const uint32_t gradient = worker.tmem + Config::kQueryGradient;
    stage_channel<Config, Element>(staged + channel * 2, gradient + worker.group * Config::kHeads, true);
    if (has_rope && worker.group == 0) {
      uint8_t* column = staged + kOwnBytes + (worker.warp * 16 + worker.lane) * 2;
      stage_channel<Config, Element>(column, worker.tmem + Config::kQueryGradientRope, worker.lane < 16);
    }
    sm100::fence_before_sync();
    named_barrier_sync(kWorkers, Config::kWorkerThreads);
  }
  uint8_t* start = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes;
  const int chunks = kOwnBytes / 16 + (has_rope ? static_cast<int>(kSwizzleRowBytes) / 16 : 0);
  for (int head = threadIdx.x / 32; head < params.h_q; head += Config::kWorkerWarps) {
    uint8_t* line = start + head * params.dq_head_bytes;
    for (int chunk = worker.lane; chunk < chunks; chunk += 32) {
      // The RoPE's channels come behind those of both CTAs.
      const int place = chunk * 16 < kOwnBytes ? worker.rank * kOwnBytes : kOwnBytes;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (computed) eight = *reinterpret_cast<const uint4*>(staged + head * kRow + chunk * 16);
      *reinterpret_cast<uint4*>(line + place + chunk * 16) = eight;
    }
  }
}

}  // namespace cupymla::sparse_mla_bwd
