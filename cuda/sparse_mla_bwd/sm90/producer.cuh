// The producer warpgroup: brings in Q and dO, gathers the selected KV rows and says which tokens they are.
#pragma once

#include "../../common/sm90/row_gather.cuh"
#include "../../common/tma.cuh"
#include "../params.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_bwd {

// The one buffer, whose tiles are all freed at once. Of its three barriers the gather waits for the first ahead of its
// first part, and for the others, which hold it up no more, ahead of the last two: one would do, but code with three is
// what has been measured.
template <typename Config>
struct KeyBuffer : sm90::OneBuffer<Config> {
  static_assert(Config::kParts == 4);
  static __device__ __forceinline__ constexpr int free_side(int part) {
    return part == 0 ? 0 : part == 1 ? -1 : part - 1;
  }

  // Through a reduction, so that ptxas does not add it in the copies themselves, as it does what it computes alike for
  // all lanes: `LDGSTS [R + UR], desc[UR]`, and such a copy gets a descriptor in an odd register, which is an illegal
  // instruction (seen on an H200 with ptxas 13.0). A shuffle keeps it from that too, but made ptxas 12.9 spill.
  template <typename Storage>
  __device__ __forceinline__ uint32_t address(const Storage& storage, int part, int first) const {
    return __reduce_max_sync(0xffffffffu, sm90::OneBuffer<Config>::address(storage, part, first));
  }
};

template <typename Config>
struct Producer {
  sm90::RowGather<Config, Storage<Config>> gather;
  const Parameters& params;
  // Places among the phases, after the key buffer: of the head block, and of the set that has the next block's tokens.
  static constexpr int kHeadBlock = 1, kTokens = 2;

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params)
      : gather(storage), params(params) {}

  __device__ __forceinline__ void run(const Work<Config>& work, int32_t head_block, const TensorMap& q_map,
                                      const TensorMap& dout_map) {
    load_heads(work, first_head<Config>(head_block), q_map, dout_map);
    const uint8_t* kv = params.kv + work.batch * params.kv_batch_bytes;
    if constexpr (Config::kQueries > 1) {
      if (head_block == 0) gather.storage.decided.wait(0);
    }
    int32_t row_entry = work.load_row_entry(params, gather, 0);
    for (int block = 0; work.has_block(block); ++block) {
      if constexpr (Config::kQueries > 1) make_opaque(row_entry);  // one register, not one for each half
      const int32_t next_row_entry = work.load_row_entry(params, gather, block + 1);
      const uint32_t shown = shown_queries(head_block);
      const int32_t token = work.token(row_entry, shown);
      // The set's last block is done with: the one after it has been copied, for which its tiles had to be free.
      if (gather.lane < gather.kWarpKeys) {
        gather.storage.tokens[token_set()][gather.warp * gather.kWarpKeys + gather.lane] = token;
      }
      if constexpr (Config::kQueries > 1) say_whose(token < 0 ? 0u : queries_of(row_entry) & shown);
      gather.phases.advance(kTokens);
      __syncwarp();
      const KeyBuffer<Config> places{{0, gather.phases.free(0)}};
      gather.fill_places(token, work.token_limit, kv, params.kv_token_bytes, places);
      gather.phases.advance(0);
      row_entry = next_row_entry;
    }
  }

  // Which queries a head block is for, one bit each.
  __device__ __forceinline__ uint32_t shown_queries(int32_t head_block) {
    if constexpr (Config::kQueries == 1) return 1;
    // Read in each block, as there is no register to keep it in.
    const uint32_t non_finite = *static_cast<const volatile uint32_t*>(&gather.storage.non_finite);
    return non_finite != 0 ? 1u << head_block : (1u << Config::kQueries) - 1;
  }

  // Which of the warp's sixteen rows each query has. A lane knows the queries of one row.
  __device__ __forceinline__ void say_whose(uint32_t queries) {
#pragma unroll
    for (int own = 0; own < Config::kQueries; ++own) {
      const uint32_t rows = __ballot_sync(0xffffffffu, (queries >> own & 1u) != 0);
      if (gather.lane == own) {
        gather.storage.query_valid[token_set()][own][gather.warp] = static_cast<uint16_t>(rows);
      }
    }
  }

  __device__ __forceinline__ uint32_t token_set() const { return gather.phases.full(kTokens); }

  __device__ __forceinline__ void load_heads(const QueryPosition& query, int32_t head, const TensorMap& q_map,
                                             const TensorMap& dout_map) {
    auto& storage = gather.storage;
    if (gather.warp == 0 && gather.lane == 0) {
      storage.heads_free.wait(gather.phases.free(kHeadBlock));
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
    gather.phases.advance(kHeadBlock);
  }
};

}  // namespace cupymla::sparse_mla_bwd
