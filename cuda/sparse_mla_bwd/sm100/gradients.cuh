// What workers bring out of Tensor Memory where heads are many: a block's dKV, and after the last block dQ and the
// sink's term.
#pragma once

#include "row_targets.cuh"
#include "workers.cuh"

namespace cupymla::sparse_mla_bwd {

// Takes the block's dKV out of Tensor Memory, of which a lane is a channel now, and sends it on.
template <typename Config, typename Element>
__device__ __forceinline__ void send_key_gradient(const Worker<Config, Element>& worker,
                                                  const RowTargets<Config>& targets) {
  Storage<Config>& storage = worker.storage;
  storage.dkv_full[worker.group].wait(worker.turn.parity());
  sm100::fence_after_sync();
  if (threadIdx.x / 32 == Config::kWorkerWarps - 1) worker.arrive_at_both(storage.tiles_free);
  uint32_t values[Config::kSlots];
  sm100::tmem_load(values, worker.tmem + Config::kKeyGradient + worker.group * Config::kSlots);
  sm100::wait_loads();
  sm100::fence_before_sync();
  __syncwarp();
  if (worker.lane == 0) storage.sums_free.arrive();

  const int32_t* tokens = storage.tokens[worker.turn.set()];
  const int32_t channel = (worker.rank * 2 + worker.group) * Config::kWarpgroup + worker.row;
  targets.write(0, tokens, channel, values);
  if (!Config::kHasRope || worker.rank != 0) return;
  // The next block's RoPE comes after tiles_full, by which this one has been read. Its accumulator, of 64 rows, has 16
  // of them in each quarter of the lanes.
  constexpr int kColumns = Config::kSlots / 2;
  const int first = worker.group * kColumns;
  uint32_t rope[kColumns];
  sm100::tmem_load(rope, worker.tmem + Config::kKeyGradientRope + first);
  sm100::wait_loads();
  sm100::fence_before_sync();
  if (worker.lane < 16) targets.write(first, tokens + first, Config::kDV + worker.warp * 16 + worker.lane, rope);
}

// What this query adds to d_sink, by the first CTA's first workers; nothing where no slot was valid.
template <typename Config, typename Element>
__device__ __forceinline__ void store_sink_terms(const Worker<Config, Element>& worker, const QueryPosition& query,
                                                 int32_t first_head) {
  const Parameters& params = worker.params;
  const int32_t head = first_head + worker.row;
  if (params.sink_terms == nullptr || worker.rank != 0 || worker.group != 0 || head >= params.h_q) return;
  store_sink_term(params, query, head, worker.occupied, worker.delta);
}

// 32 columns of dQ, from Tensor Memory or zeros, rounded.
template <typename Element>
__device__ __forceinline__ void store_columns(uint8_t* line, uint32_t address, bool computed, bool wanted) {
  uint32_t values[32] = {};
  if (computed) {
    sm100::tmem_load_32(values, address);
    sm100::wait_loads();
  }
  if (!wanted) return;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = pack_pair<Element>(__uint_as_float(values[i + 2 * j]), __uint_as_float(values[i + 2 * j + 1]));
    }
    *reinterpret_cast<uint4*>(line + i * 2) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// dQ of this CTA's channels: a warpgroup has half of them. `computed`: whether there was a block.
template <typename Config, typename Element>
__device__ __forceinline__ void store_query_gradient(const Worker<Config, Element>& worker, const QueryPosition& query,
                                                     int32_t first_head, bool computed) {
  constexpr int kColumns = Config::kOwnTiles * Config::kTileColumns / 2;
  const Parameters& params = worker.params;
  const int32_t head = first_head + worker.row;
  const bool wanted = head < params.h_q;
  uint8_t* line = params.dq + query.batch * params.dq_batch_bytes + query.query * params.dq_query_bytes +
                  head * params.dq_head_bytes;
  uint8_t* own = line + (worker.rank * 2 + worker.group) * kColumns * 2;
  const uint32_t address = worker.tmem + Config::kQueryGradient + worker.group * kColumns;
  for (int column = 0; column < kColumns; column += 32) {
    store_columns<Element>(own + column * 2, address + column, computed, wanted);
  }
  if (Config::kHasRope && worker.rank == 0) {
    const int column = worker.group * 32;
    store_columns<Element>(line + (Config::kDV + column) * 2, worker.tmem + Config::kQueryGradientRope + column,
                           computed, wanted);
  }
  sm100::fence_before_sync();
}

}  // namespace cupymla::sparse_mla_bwd
