// The producer warpgroup: brings in Q, gathers the selected KV rows into shared memory and says which slots are valid.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/ring.cuh"
#include "../../common/tma.cuh"
#include "query.cuh"
#include "storage.cuh"

namespace cupymla::sparse_mla_fwd {

// Each warp serves sixteen consecutive slots of a block: lane l knows the token of slot l % 16, and in each of four
// passes eight lanes copy 128 bytes of one row.
template <typename Config>
struct Producer {
  static constexpr int kWarpSlots = 16;
  static constexpr int kPasses = 4;

  Storage<Config>& storage;
  const Parameters& params;
  const TensorMap& q_map;
  const int warp = (threadIdx.x / 32) % 4;
  const int lane = threadIdx.x % 32;
  const uint64_t l2_policy = l2_policy_evict_last();
  Phases phases;      // of the key buffers
  uint32_t q_round = 0;  // parity of the queries gone through

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params, const TensorMap& q_map)
      : storage(storage), params(params), q_map(q_map) {}

  __device__ __forceinline__ void run(const Share<Config>& share) {
    for (uint32_t position = share.token; position < share.end; ++position) {
      const Query<Config> query(params, position);
      const int32_t* indices =
          params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
      int32_t token = load_token(indices, query, 0);
      load_query(query, share.first_head);
      for (int block = 0; block < query.blocks; ++block) {
        const int32_t next_token = load_token(indices, query, block + 1);
        gather(token, query, block % 2);
        token = next_token;
      }
    }
  }

  // The token of this lane's slot of `block`, or -1 where there is no slot.
  __device__ __forceinline__ int32_t load_token(const int32_t* indices, const Query<Config>& query, int block) const {
    const int slot = block * Config::kSlots + warp * kWarpSlots + lane % kWarpSlots;
    return slot < query.slots ? __ldg(indices + slot) : -1;
  }

  __device__ __forceinline__ void load_query(const Query<Config>& query, int32_t first_head) {
    if (warp == 0 && lane == 0) {
      storage.q_free.wait(q_round ^ 1u);
      storage.q_full.arrive_and_expect(sizeof(storage.q));
      for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
        tma_load_4d(storage.q[tile], q_map, storage.q_full, tile * Config::kTileColumns, first_head, query.query,
                    query.batch);
      }
    }
    __syncwarp();
    q_round ^= 1u;
  }

  __device__ __forceinline__ void gather(int32_t token, const Query<Config>& query, int buffer) {
    const bool valid = static_cast<uint32_t>(token) < query.token_limit;
    const uint32_t valid_lanes = __ballot_sync(0xffffffffu, valid);

    const uint8_t* rows = params.kv + query.batch * params.kv_batch_bytes + (lane % 8) * 16;
    const uint8_t* source[kPasses];
    uint32_t destination[kPasses];
    bool take[kPasses];
    const uint32_t base = smem_address(storage.k[buffer][0]);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int slot = pass * 4 + lane / 8;
      const int32_t row = __shfl_sync(0xffffffffu, token, slot);
      take[pass] = (valid_lanes >> slot) & 1u;
      source[pass] = rows + (take[pass] ? row * params.kv_token_bytes : 0);
      destination[pass] = base + swizzle_128(warp * kWarpSlots + slot, lane % 8);
    }

#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      if (part == 0) storage.free[buffer][0].wait(phases.free(buffer));
      if (part == Config::kLeftParts) storage.free[buffer][1].wait(phases.free(buffer));
#pragma unroll
      for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          copy_async_16_or_zero(destination[pass] + tile * Config::kTileBytes,
                                source[pass] + tile * static_cast<int>(kSwizzleRowBytes), take[pass], l2_policy);
        }
      }
      storage.full[buffer][part].arrive_after_copies();
    }
    if (lane == 0) {
      storage.valid[buffer][warp] = static_cast<uint16_t>(valid_lanes);
      storage.full[buffer][Config::kParts - 1].arrive();
    }
    phases.advance(buffer);
  }
};

}  // namespace cupymla::sparse_mla_fwd
