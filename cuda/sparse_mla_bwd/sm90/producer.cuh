// The producer warpgroup: brings in Q and dO, gathers the selected KV rows and says which tokens they are.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/sm90/row_gather.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/tma.cuh"
#include "../params.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_bwd {

// First head of a CTA's block of heads in a pass.
template <typename Config>
__device__ __forceinline__ int32_t first_head(int32_t pass) {
  const int32_t rank = Config::kCluster == 1 ? 0 : static_cast<int32_t>(cluster_rank());
  return (pass * Config::kCluster + rank) * Config::kHeads;
}

// The one buffer, whose left tiles are free first, then those that are either consumer's staging.
template <typename Config>
struct StagedBuffer : sm90::OneBuffer<Config> {
  static_assert(Config::kParts == Config::kLeftParts + Config::kConsumers, "a part for each consumer's staging");
  static __device__ __forceinline__ constexpr int free_side(int part) {
    return part == 0 ? 0 : part < Config::kLeftParts ? -1 : 1 + part - Config::kLeftParts;
  }
};

template <typename Config>
struct Producer {
  sm90::RowGather<Config, Storage<Config>> gather;
  const Parameters& params;
  static constexpr int kPass = 1;  // the pass's place among the phases, after the key buffer
  uint32_t token_set = 0;          // of the next block

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params)
      : gather(storage), params(params) {}

  __device__ __forceinline__ void run(const SparseQuery<Config::kSlots>& query, int32_t pass, const TensorMap& q_map,
                                      const TensorMap& dout_map) {
    load_heads(query, first_head<Config>(pass), q_map, dout_map);
    const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
    const uint8_t* kv = params.kv + query.batch * params.kv_batch_bytes;
    int32_t token = gather.load_token(indices, query.slots, 0);
    for (int block = 0; block < query.blocks; ++block) {
      const int32_t next_token = gather.load_token(indices, query.slots, block + 1);
      // The set's last block is done with: the one after it has been copied, for which its tiles had to be free.
      if (gather.lane < gather.kWarpSlots) {
        gather.storage.tokens[token_set][gather.warp * gather.kWarpSlots + gather.lane] = token;
      }
      token_set ^= 1u;
      __syncwarp();
      const StagedBuffer<Config> places{{0, gather.phases.free(0)}};
      gather.fill_places(token, query.token_limit, kv, params.kv_token_bytes, places);
      gather.phases.advance(0);
      token = next_token;
    }
  }

  __device__ __forceinline__ void load_heads(const QueryPosition& query, int32_t head, const TensorMap& q_map,
                                             const TensorMap& dout_map) {
    auto& storage = gather.storage;
    if (gather.warp == 0 && gather.lane == 0) {
      storage.heads_free.wait(gather.phases.free(kPass));
      storage.heads_full.arrive_and_expect(sizeof(storage.q) + sizeof(storage.dout));
      for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
        tma_load_4d(storage.q[tile], q_map, storage.heads_full, tile * Config::kTileColumns, head, query.query,
                    query.batch);
      }
      for (int tile = 0; tile < Config::kValueTiles; ++tile) {
        tma_load_4d(storage.dout[tile], dout_map, storage.heads_full, tile * Config::kTileColumns, head, query.query,
                    query.batch);
      }
    }
    __syncwarp();
    gather.phases.advance(kPass);
  }
};

}  // namespace cupymla::sparse_mla_bwd
