// The producer warp: brings in this CTA's channels of Q, dO and the selected rows, and says which tokens they are.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sm100/topk_gather.cuh"
#include "../params.cuh"
#include "config.cuh"
#include "pipeline_state.cuh"

namespace cupymla::sparse_mla_bwd {

template <typename Storage>
struct Producer {
  using Config = typename Storage::Config;

  Storage& storage;
  const Parameters& params;
  const int rank = static_cast<int>(cluster_rank());
  const bool has_rope = Config::kHasRope && rank == 0;
  const uint32_t lane = threadIdx.x % 32;
  PipelineState<Config::kSets> state;

  __device__ __forceinline__ void run(const SparseQuery<Config::kTileKeys>& query, int32_t first_head,
                                      const TensorMap& q_map, const TensorMap& dout_map, const TensorMap& kv_map) {
    if (query.blocks == 0) return;
    if (lane == 0) load_heads(query, first_head, q_map, dout_map);
    __syncwarp();
    const sm100::QueryEntries entries(params, query);
    for (int32_t block = 0; block < query.blocks; ++block) {
      const int32_t entry = block * Config::kTileKeys;
      const int4 rows = entries.rows(entries.four_tokens(entry + sm100::group_entry<Config::kTileKeys>(lane)));
      int32_t tokens[Config::kKeyWords];
#pragma unroll
      for (int word = 0; word < Config::kKeyWords; ++word) tokens[word] = entries.token(entry + word * 32 + lane);
      storage.k_free.wait(state.parity() ^ 1u);
      gather(kv_map, rows);
#pragma unroll
      for (int word = 0; word < Config::kKeyWords; ++word) {
        const bool is_valid = entries.is_valid(tokens[word]);
        const uint32_t valid = __ballot_sync(0xffffffffu, is_valid);
        storage.tokens[state.set()][word * 32 + lane] = is_valid ? tokens[word] : -1;
        if (lane == 0) storage.valid[state.set()][word] = valid;
      }
      __syncwarp();
      if (lane == 0) storage.entries_full[state.set()].arrive();
      state.advance();
    }
  }

  __device__ __forceinline__ void gather(const TensorMap& kv_map, int4 rows) {
    const uint32_t bytes = (Config::kOwnTiles + (has_rope ? 1 : 0)) * Config::kKeyTileBytes;
    if (lane == 0) storage.k_full.arrive_and_expect(bytes);
    __syncwarp();
    sm100::gather_group<Config::kOwnTiles, false, Config::kTileKeys>(storage.k[0], kv_map, storage.k_full,
                                                                     rank * Config::kOwnTiles, rows, lane);
    if constexpr (Config::kHasRope) {
      if (has_rope) {
        sm100::gather_group<1, false, Config::kTileKeys>(storage.k[Config::kRopeTile], kv_map, storage.k_full,
                                                         Config::kValueTiles, rows, lane);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_heads(const QueryPosition& query, int32_t first_head, const TensorMap& q_map,
                                             const TensorMap& dout_map) {
    const int tiles = 2 * Config::kOwnTiles + (has_rope ? 1 : 0);
    storage.heads_full.arrive_and_expect(tiles * Config::kHeadTileBytes);
    for (int box = 0; box < Config::kHeads / Config::kBoxHeads; ++box) {
      const int32_t head = first_head + box * Config::kBoxHeads;
      const int place = box * Config::kBoxBytes;
      for (int tile = 0; tile < Config::kOwnTiles; ++tile) {
        const int32_t column = (rank * Config::kOwnTiles + tile) * Config::kTileColumns;
        tma_load_4d(storage.q[tile] + place, q_map, storage.heads_full, column, head, query.query, query.batch);
        tma_load_4d(storage.dout[tile] + place, dout_map, storage.heads_full, column, head, query.query, query.batch);
      }
      if (has_rope) {
        tma_load_4d(storage.q[Config::kRopeTile] + place, q_map, storage.heads_full, Config::kDV, head, query.query,
                    query.batch);
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
