// The producer warpgroup of the kernel `dq_dkv`: Q and dO, P and dS of every block, and these columns of its keys.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/tma.cuh"
#include "dq_dkv_storage.cuh"

namespace cupymla::sparse_mla_bwd {

// Each warp serves sixteen places of a block: lane l knows the token of place l % 16, and in each of four turns eight
// lanes copy 128 bytes of a row.
template <typename Config>
struct DqDkvProducer {
  static constexpr int kWarpKeys = 16;
  static constexpr int kTurns = kWarpKeys / 4;

  DqDkvStorage<Config>& storage;
  const Parameters& params;
  const SparseQuery<Config::kTileKeys>& query;
  const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int tiles = ColumnSplit<Config>::tiles(ColumnSplit<Config>::is_last());
  Ring<Config::kSets> ring;

  __device__ __forceinline__ bool is_first() const { return warp == 0 && lane == 0; }

  __device__ __forceinline__ void load_heads(const TensorMap& q_map, const TensorMap& dout_map) {
    if (is_first()) {
      storage.heads_full.arrive_and_expect(2 * Config::kGroups * tiles * Config::kTileBytes);
      for (int group = 0; group < Config::kGroups; ++group) {
        for (int tile = 0; tile < tiles; ++tile) {
          const int32_t column = (ColumnSplit<Config>::first_tile() + tile) * Config::kTileColumns;
          const int32_t head = group * Config::kHeads;
          tma_load_4d(storage.q[group][tile], q_map, storage.heads_full, column, head, query.query, query.batch);
          // Zeros past the values.
          tma_load_4d(storage.dout[group][tile], dout_map, storage.heads_full, column, head, query.query, query.batch);
        }
      }
    }
    __syncwarp();
  }

  // An ordinary load: in the place of indices there may be lists that the kernel before has written.
  __device__ __forceinline__ int32_t load_token(int32_t block) const {
    const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
    const int32_t place = static_cast<int32_t>(warp * kWarpKeys + lane % kWarpKeys);
    const int32_t entry = block * Config::kTileKeys + entry_of_place(place);
    return entry < query.entries ? indices[entry] : -1;
  }

  __device__ __forceinline__ void run(uint32_t place) {
    int32_t token = load_token(0);
    for (int32_t block = 0; block < query.blocks; ++block) {
      const int32_t next = load_token(block + 1);
      fill(token, stored_p_ds(params, place, block));
      ring.advance();
      token = next;
    }
  }

  __device__ __forceinline__ void fill(int32_t token, const uint8_t* p_ds) {
    const uint32_t set = ring.stage;
    const bool is_valid = static_cast<uint32_t>(token) < query.token_limit;
    const uint32_t valid = __ballot_sync(0xffffffffu, is_valid);
    const uint8_t* rows = params.kv + query.batch * params.kv_batch_bytes +
                          ColumnSplit<Config>::first_tile() * static_cast<int>(kSwizzleRowBytes) + lane % 8 * 16;
    make_opaque(rows);  // so that each row's offset is added to it in one instruction
    const uint8_t* source[kTurns];
    uint32_t destination[2];  // rows eight apart are swizzled alike
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const uint32_t entry = turn * 4 + lane / 8;
      const uint32_t row = __shfl_sync(0xffffffffu, token, entry);
      source[turn] = rows + static_cast<int64_t>((valid >> entry & 1u) != 0 ? row : 0u) * params.kv_token_bytes;
      if (turn < 2) destination[turn] = swizzle_128(warp * kWarpKeys + entry, lane % 8);
    }
    storage.free[set].wait(ring.free());
    if (is_first()) {
      storage.full[set].arrive_and_expect(sizeof(storage.p_ds[set]));
      // Other CTAs of the query read them at about the same time and nobody later, or, of shares that come one after
      // another, so much later that they have left L2 by then.
      bulk_load(storage.p_ds[set], p_ds, sizeof(storage.p_ds[set]), storage.full[set],
                l2_policy_evict_first());
    }
    if (lane < kWarpKeys) storage.tokens[set][warp * kWarpKeys + lane] = is_valid ? token : -1;
    __syncwarp();
    if (lane == 0) storage.full[set].arrive();
    // Through a reduction, for what is told of `KeyBuffer::address` in producer.cuh.
    const uint32_t keys = __reduce_max_sync(0xffffffffu, smem_address(storage.k[set][0]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      destination[i] += keys;
      make_opaque(destination[i]);
    }
    const uint64_t l2_policy = l2_policy_evict_last();
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      if (tile >= tiles) break;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        copy_async_16_or_zero(destination[turn % 2] + tile * Config::kTileBytes + turn / 2 * kSwizzleAtomBytes,
                              source[turn] + tile * static_cast<int>(kSwizzleRowBytes),
                              (valid >> (turn * 4 + lane / 8) & 1u) != 0, l2_policy);
      }
    }
    storage.full[set].arrive_after_copies();
  }
};

}  // namespace cupymla::sparse_mla_bwd
