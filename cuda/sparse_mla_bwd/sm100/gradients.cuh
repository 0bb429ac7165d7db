// What workers bring out where heads are many, after a head block's last block: dQ and the sink's term.
#pragma once

#include "workers.cuh"

namespace cupymla::sparse_mla_bwd {

// What this query adds to d_sink, by the first CTA's first workers; nothing where no entry was valid.
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

// dQ of this CTA's channels: a warpgroup has half of them. `computed`: whether there was a block; all its products are
// done then.
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
  if (computed) sm100::fence_after_sync();
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
