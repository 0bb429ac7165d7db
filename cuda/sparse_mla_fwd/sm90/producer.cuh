// The producer warpgroup: gathers the selected KV rows into shared memory and says which slots are valid.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/ring.cuh"
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
  const Query<Config>& query;
  const int warp;
  const int lane;
  const int32_t* indices;
  const uint8_t* rows;
  const uint64_t l2_policy;

  __device__ __forceinline__ Producer(Storage<Config>& storage, const Parameters& params, const Query<Config>& query)
      : storage(storage),
        params(params),
        query(query),
        warp((threadIdx.x / 32) % 4),
        lane(threadIdx.x % 32),
        indices(params.indices + query.batch * params.indices_batch + query.query * params.indices_query),
        rows(params.kv + query.batch * params.kv_batch_bytes + (lane % 8) * 16),
        l2_policy(l2_policy_evict_last()) {}

  // The token of this lane's slot of `block`, or -1 where there is no slot.
  __device__ __forceinline__ int32_t load_token(int block) const {
    const int slot = block * Config::kSlots + warp * kWarpSlots + lane % kWarpSlots;
    return slot < query.slots ? __ldg(indices + slot) : -1;
  }

  __device__ __forceinline__ void run() {
    Ring<Config::kBuffers> ring;
    int32_t token = load_token(0);
    for (int block = 0; block < query.blocks; ++block) {
      const int32_t next_token = load_token(block + 1);
      gather(token, ring);
      token = next_token;
      ring.advance();
    }
  }

  __device__ __forceinline__ void gather(int32_t token, const Ring<Config::kBuffers>& ring) {
    const int buffer = ring.stage;
    const bool valid = static_cast<uint32_t>(token) < query.token_limit;
    const uint32_t valid_lanes = __ballot_sync(0xffffffffu, valid);

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
      if (part == 0) storage.free[buffer][0].wait(ring.free_parity());
      if (part == Config::kLeftParts) storage.free[buffer][1].wait(ring.free_parity());
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
  }
};

}  // namespace cupymla::sparse_mla_fwd
