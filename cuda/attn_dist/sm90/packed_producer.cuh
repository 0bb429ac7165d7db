// The producer warpgroup of the kernel for neighbouring queries: finds the rows that eight queries have in all, brings
// in their Q, gathers the rows and says whose they are.
#pragma once

#include "../../common/warp.cuh"
#include "../../common/sm90/row_gather.cuh"
#include "../../common/tma.cuh"
#include "packed_members.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct PackedProducer {
  using Gather = sm90::RowGather<Config, PackedStorage<Config>, Config::kValidityPart>;

  PackedStorage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  PipelineState state;  // the next in the ring

  __device__ __forceinline__ PackedProducer(PackedStorage<Config>& storage, const Parameters& params,
                                            const TensorMap& q_map)
      : storage(storage), params(params), q_map(q_map) {}

  __device__ __forceinline__ void run() {
    if (leads()) {
      storage.index = blockIdx.x;
      storage.query_groups = storage.rows = 0;
    }
    for (;;) {
      named_barrier_sync(kQueryGroupRead, Config::kWarpgroup);
      if (leads()) publish_query_group();
      named_barrier_sync(kQueryGroupPublished, Config::kWarpgroup);
      if (query_group().first_query < 0) break;
      const Members<Config> members{storage, params, warp, lane};
      members.list(set());
      if (storage.rows == 0) {
        clear();
      } else {
        load_queries();
        gather_blocks(members);
      }
    }
    end();
  }

  __device__ __forceinline__ bool leads() const { return warp == 0 && elect_one(); }
  __device__ __forceinline__ int set() const { return static_cast<int>(storage.query_groups & 1u); }
  __device__ __forceinline__ QueryGroup& query_group() { return storage.query_group[set()]; }

  // By the leader. A query group without rows was kept from consumers, and leaves its set to the next.
  __device__ __forceinline__ void publish_query_group() {
    if (storage.rows != 0) ++storage.query_groups;
    const uint32_t index = storage.index;
    storage.index += gridDim.x;
    if (index >= params.groups) {
      query_group().first_query = -1;
      return;
    }
    const uint32_t query_groups_of_entry = (params.s_q - 1) / Config::kQueries + 1;
    const uint32_t batch = index / query_groups_of_entry;
    query_group().kv = params.kv + batch * params.kv_batch_bytes;
    query_group().batch = static_cast<int32_t>(batch);
    query_group().first_query = static_cast<int32_t>(index % query_groups_of_entry) * Config::kQueries;
  }

  // Zeros for queries without rows.
  __device__ __forceinline__ void clear() {
    for (int32_t own = 0; own < Config::kQueries; ++own) {
      const int32_t query = query_group().first_query + own;
      if (query >= params.s_q) break;
      float* row = params.dist + query_group().batch * params.dist_batch + query * params.dist_query;
      for (int32_t entry = threadIdx.x % Config::kWarpgroup; entry < params.topk; entry += Config::kWarpgroup) {
        __stcg(row + entry, 0.f);
      }
    }
  }

  // Its Q, and where the query group ends: heads past a query's last and queries past the last read as zero.
  __device__ __forceinline__ void load_queries() {
    for (int half = 0; half < Config::kConsumers; ++half) {
      wait_free();
      if (leads()) {
        if (half == 0) {
          query_group().end =
              state.count + Config::kConsumers + (storage.rows + Config::kTileKeys - 1) / Config::kTileKeys;
        }
        for (int part = 0; part < Config::kParts; ++part) {
          const int begin = Config::part_begin(part), end = Config::part_begin(part + 1);
          auto& full = storage.full[state.buffer()][part];
          full.arrive_and_expect((end - begin) * Config::kTileBytes);
          for (int tile = begin; tile < end; ++tile) {
            tma_load_4d(storage.k[state.buffer()][tile], q_map, full, tile * Config::kTileColumns, 0,
                        query_group().first_query + half * Config::kConsumerQueries, query_group().batch);
          }
        }
      } else {
        for (int part = 0; part < Config::kParts; ++part) storage.full[state.buffer()][part].arrive();
      }
      finish_buffer();
    }
  }

  __device__ __forceinline__ void gather_blocks(const Members<Config>& members) {
    Gather gather(storage);
    for (uint32_t first = 0; first < storage.rows; first += Config::kTileKeys) {
      const uint32_t row = first + warp * Gather::kWarpKeys + lane % Gather::kWarpKeys;
      const int32_t token = row < storage.rows ? storage.tokens[row] : -1;
      members.publish(set(), state, token);
      gather.fill_places(token, params.s_kv, query_group().kv, params.kv_token_bytes,
                         sm90::OneBuffer<Config>{state.buffer(), state.parity() ^ 1u});
      ++state.count;
    }
  }

  // Tells consumers that there are no more query groups, which the last one said is.
  __device__ __forceinline__ void end() {
    wait_free();
    storage.full[state.buffer()][Config::kValidityPart].arrive();
    finish_buffer();
  }

  // For both halves of the buffer: consumers free the left one first.
  __device__ __forceinline__ void wait_free() { storage.free[state.buffer()][1].wait(state.parity() ^ 1u); }

  // The arrivals that come with validity words elsewhere.
  __device__ __forceinline__ void finish_buffer() {
    if (lane == 0) storage.full[state.buffer()][Config::kValidityPart].arrive();
    ++state.count;
  }
};

}  // namespace cupymla::attn_dist
