// What is brought out of Tensor Memory where heads are few: dKV by the reducers, part by part, and after the last block
// dQ and the sink's term by the workers.
#pragma once

#include "../../common/ring.cuh"
#include "few_heads_workers.cuh"
#include "row_targets.cuh"

namespace cupymla::sparse_mla_bwd {

// The reducer warpgroup. A lane of Tensor Memory is a channel here.
template <typename Config>
struct Reducer {
  FewHeadsStorage<Config>& storage;
  const Parameters& params;
  const int rank = static_cast<int>(cluster_rank());
  const int warp = (threadIdx.x / 32) % 4, lane = threadIdx.x % 32;
  const uint32_t tmem = sm100::tmem_lane(storage.tmem, warp * 32);
  Ring<Config::kRing> ring;
  Turn<Config::kSets> turn;

  __device__ __forceinline__ void run(const SparseQuery<Config::kSlots>& query) {
    const int parts = Config::kValueParts + (Config::kHasRope && rank == 0 ? Config::kRopeParts : 0);
    for (int32_t block = 0; block < query.blocks; ++block) {
      const RowTargets<Config> targets(params, query, block * Config::kSlots, 0);
      storage.slots_full[turn.set()].wait(turn.set_parity());
      for (int part = 0; part < parts; ++part) send(targets, part);
      turn.advance();
    }
  }

  // Takes one part of the block's dKV and sends it on.
  __device__ __forceinline__ void send(const RowTargets<Config>& targets, int part) {
    uint32_t values[Config::kPartSlots];
    storage.part_full[ring.stage].wait(ring.full);
    sm100::fence_after_sync();
    sm100::tmem_load(values, tmem + Config::kKeyGradient + ring.stage * Config::kPartSlots);
    sm100::wait_loads();
    sm100::fence_before_sync();
    __syncwarp();
    if (lane == 0) storage.part_free[ring.stage].arrive();
    ring.advance();

    int32_t channel = (rank * 2 + part / Config::kHalves) * 2 * Config::kTileColumns + warp * 32 + lane;
    if (Config::kHasRope && part >= Config::kValueParts) {
      // An accumulator of 64 rows has 16 of them in each quarter of the lanes.
      if (lane >= 16) return;
      channel = Config::kDV + warp * 16 + lane;
    }
    const int first = part % Config::kHalves * Config::kPartSlots;
    targets.write(first, storage.tokens[turn.set()] + first, channel, values);
  }
};

// What this query adds to d_sink, by the first CTA's first workers; nothing where no slot was valid.
template <typename Config, typename Element>
__device__ __forceinline__ void store_sink_terms(const FewHeadsWorker<Config, Element>& worker,
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
  constexpr int kRow = FewHeadsStorage<Config>::kQueryGradientRow;
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
__device__ __forceinline__ void store_query_gradient(const FewHeadsWorker<Config, Element>& worker,
                                                     const QueryPosition& query, bool computed) {
  constexpr int kRow = FewHeadsStorage<Config>::kQueryGradientRow;
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
