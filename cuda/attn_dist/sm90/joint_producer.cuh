// The producer warpgroup of the kernel for neighbouring queries: finds the rows that eight queries have in all, brings
// in their Q, gathers the rows and says whose they are.
#pragma once

#include "../../common/warp.cuh"
#include "../../common/sm90/row_gather.cuh"
#include "../../common/tma.cuh"
#include "joint_members.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct JointProducer {
  using Gather = sm90::RowGather<Config, JointStorage<Config>, Config::kValidityPart>;

  JointStorage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  Turn turn;  // the next in the ring

  __device__ __forceinline__ JointProducer(JointStorage<Config>& storage, const Parameters& params,
                                           const TensorMap& q_map)
      : storage(storage), params(params), q_map(q_map) {}

  __device__ __forceinline__ void run() {
    if (leads()) {
      storage.index = blockIdx.x;
      storage.bunches = storage.rows = 0;
    }
    for (;;) {
      named_barrier_sync(kBunchRead, Config::kWarpgroup);
      if (leads()) say_bunch();
      named_barrier_sync(kBunchSaid, Config::kWarpgroup);
      if (bunch().first_query < 0) break;
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
  __device__ __forceinline__ int set() const { return static_cast<int>(storage.bunches & 1u); }
  __device__ __forceinline__ Bunch& bunch() { return storage.bunch[set()]; }

  // By the leader. A bunch without rows was kept from consumers, and leaves its set to the next.
  __device__ __forceinline__ void say_bunch() {
    if (storage.rows != 0) ++storage.bunches;
    const uint32_t index = storage.index;
    storage.index += gridDim.x;
    if (index >= params.groups) {
      bunch().first_query = -1;
      return;
    }
    const uint32_t bunches_of_entry = (params.s_q - 1) / Config::kQueries + 1;
    const uint32_t batch = index / bunches_of_entry;
    bunch().kv = params.kv + batch * params.kv_batch_bytes;
    bunch().batch = static_cast<int32_t>(batch);
    bunch().first_query = static_cast<int32_t>(index % bunches_of_entry) * Config::kQueries;
  }

  // Zeros for queries without rows.
  __device__ __forceinline__ void clear() {
    for (int32_t own = 0; own < Config::kQueries; ++own) {
      const int32_t query = bunch().first_query + own;
      if (query >= params.s_q) break;
      float* row = params.dist + bunch().batch * params.dist_batch + query * params.dist_query;
      for (int32_t slot = threadIdx.x % Config::kWarpgroup; slot < params.topk; slot += Config::kWarpgroup) {
        __stcg(row + slot, 0.f);
      }
    }
  }

  // Its Q, and where the bunch ends: heads past a query's last and queries past the last read as zero.
  __device__ __forceinline__ void load_queries() {
    for (int half = 0; half < Config::kConsumers; ++half) {
      wait_free();
      if (leads()) {
        if (half == 0) {
          bunch().end = turn.count + Config::kConsumers + (storage.rows + Config::kSlots - 1) / Config::kSlots;
        }
        for (int part = 0; part < Config::kParts; ++part) {
          const int begin = Config::part_begin(part), end = Config::part_begin(part + 1);
          auto& full = storage.full[turn.buffer()][part];
          full.arrive_and_expect((end - begin) * Config::kTileBytes);
          for (int tile = begin; tile < end; ++tile) {
            tma_load_4d(storage.k[turn.buffer()][tile], q_map, full, tile * Config::kTileColumns, 0,
                        bunch().first_query + half * Config::kConsumerQueries, bunch().batch);
          }
        }
      } else {
        for (int part = 0; part < Config::kParts; ++part) storage.full[turn.buffer()][part].arrive();
      }
      finish_buffer();
    }
  }

  __device__ __forceinline__ void gather_blocks(const Members<Config>& members) {
    Gather gather(storage);
    for (uint32_t first = 0; first < storage.rows; first += Config::kSlots) {
      const uint32_t row = first + warp * Gather::kWarpSlots + lane % Gather::kWarpSlots;
      const int32_t token = row < storage.rows ? storage.tokens[row] : -1;
      members.share(set(), turn, token);
      gather.fill_places(token, params.s_kv, bunch().kv, params.kv_token_bytes,
                         sm90::OneBuffer<Config>{turn.buffer(), turn.parity() ^ 1u});
      ++turn.count;
    }
  }

  // Tells consumers that there are no more bunches, which the last one said is.
  __device__ __forceinline__ void end() {
    wait_free();
    storage.full[turn.buffer()][Config::kValidityPart].arrive();
    finish_buffer();
  }

  // For both halves of the buffer: consumers free the left one first.
  __device__ __forceinline__ void wait_free() { storage.free[turn.buffer()][1].wait(turn.parity() ^ 1u); }

  // The arrivals that come with validity words elsewhere.
  __device__ __forceinline__ void finish_buffer() {
    if (lane == 0) storage.full[turn.buffer()][Config::kValidityPart].arrive();
    ++turn.count;
  }
};

}  // namespace cupymla::attn_dist
