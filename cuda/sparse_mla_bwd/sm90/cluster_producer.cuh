// The producer warpgroup of a CTA of a cluster: brings in its columns of Q and dO, and of the selected KV rows.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "../../common/tma.cuh"
#include "cluster_work.cuh"

namespace cupymla::sparse_mla_bwd {

// Each warp serves sixteen consecutive entries of a block: lane l knows the token of entry l % 16, and in each of four
// turns eight lanes copy 128 bytes of a row. Consumers leave this warpgroup 24 registers a thread, so what stands in
// shared memory is read when it is wanted.
template <typename Config>
struct ClusterProducer {
  static constexpr int kWarpKeys = 16;
  static constexpr int kTurns = 4;
  static_assert(Config::kTileKeys == 4 * kWarpKeys);

  ClusterStorage<Config>& storage;
  const Parameters& params;
  Phases phases;  // of the keys, and of the set that has the next block's tokens
  static constexpr int kKeys = 0, kTokens = 1;
  static constexpr uint32_t kHeadBlocks = 8;  // from this bit on the head block: there is no register for it

  __device__ __forceinline__ ClusterProducer(ClusterStorage<Config>& storage, const Parameters& params)
      : storage(storage), params(params) {}

  // This thread's number in the warpgroup, as often as it is wanted.
  static __device__ __forceinline__ uint32_t own_thread() { return threadIdx.x % Config::kWarpgroup; }

  __device__ __forceinline__ int32_t head_block() const { return static_cast<int32_t>(phases.bits >> kHeadBlocks); }
  __device__ __forceinline__ void end_head_block() { phases.bits += 1u << kHeadBlocks; }

  __device__ __forceinline__ void run(const TensorMap& q_map, const TensorMap& dout_map, const TensorMap& rope_map) {
    load_heads(stored_position(storage), head_block(), q_map, dout_map, rope_map);
    int32_t token = load_token(0);
    for (int32_t first_entry = 0; first_entry < stored_entries(storage); first_entry += Config::kTileKeys) {
      const int32_t next = load_token(first_entry + Config::kTileKeys);
      // The set's last block is done with: the one after it has been copied, for which dQ had to have it.
      const uint32_t thread = own_thread();
      if (thread % 32 < kWarpKeys) storage.tokens[phases.full(kTokens)][own_entry(thread)] = token;
      phases.advance(kTokens);
      __syncwarp();
      fill(token);
      phases.advance(kKeys);
      token = next;
    }
  }

  static __device__ __forceinline__ int32_t first_column() {
    return static_cast<int32_t>(cluster_rank()) * Config::kColumns;
  }
  static __device__ __forceinline__ int32_t first_rope_column() {
    return Config::kDV + static_cast<int32_t>(cluster_rank()) * Config::kRopeColumns;
  }

  // The entry of a block whose token a thread knows.
  static __device__ __forceinline__ uint32_t own_entry(uint32_t thread) {
    return thread / 32 * kWarpKeys + thread % kWarpKeys;
  }

  // An ordinary load: in the place of indices there may be lists that the kernel before has written.
  __device__ __forceinline__ int32_t load_token(int32_t first_entry) const {
    const QueryPosition at = stored_position(storage);
    const int32_t entry = first_entry + static_cast<int32_t>(own_entry(own_thread()));
    const int32_t* indices = params.indices + at.batch * params.indices_batch + at.query * params.indices_query;
    return entry < stored_entries(storage) ? indices[entry] : -1;
  }

  __device__ __forceinline__ void fill(int32_t token) {
    const uint32_t valid_lanes = __ballot_sync(0xffffffffu, static_cast<uint32_t>(token) < stored_limit(storage));
    const uint64_t l2_policy = l2_policy_evict_last();
    const uint32_t thread = own_thread(), chunk = thread % 8;
    // What is to be known, through shuffles: else ptxas works it out behind the wait, where asking for the thread's
    // number takes a turn in the queue of reductions. Addresses are worked out there: there are no registers for them.
    const uint8_t* kv = kept(params.kv + stored_position(storage).batch * params.kv_batch_bytes + first_column() * 2 +
                             chunk * 16);
    int32_t rows[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const uint32_t entry = turn * 4 + thread % 32 / 8;
      rows[turn] = __shfl_sync(0xffffffffu, (valid_lanes >> (thread % 32) & 1u) != 0 ? token : -1, entry);
    }
    // Four of the eight lanes of a row suffice for 64 bytes of the RoPE. With the place goes which CTA this is.
    const uint32_t first_row = thread / 32 * kWarpKeys + thread % 32 / 8;
    const uint32_t tiles = kept(smem_address(storage.k[0]) + swizzle_128(first_row, chunk));
    const bool has_rope = Config::kHasRope && chunk < Config::kRopeRowBytes / 16;
    const uint32_t rope =
        kept(has_rope ? (smem_address(storage.k_rope) + swizzle_64(first_row, chunk)) | cluster_rank() : 0u);
    storage.free.wait(phases.free(kKeys));
    // Rows four apart are swizzled by another half of the row, rows eight apart alike.
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const bool take = rows[turn] >= 0;
      const uint8_t* source = kv + static_cast<int64_t>(take ? rows[turn] : 0) * params.kv_token_bytes;
      const uint32_t place = (tiles ^ (turn % 2 * (kSwizzleRowBytes / 2))) + turn * 4 * kSwizzleRowBytes;
#pragma unroll
      for (int tile = 0; tile < Config::kValueTiles; ++tile) {
        copy_async_16_or_zero(place + tile * Config::kTileBytes, source + tile * static_cast<int>(kSwizzleRowBytes),
                              take, l2_policy);
      }
      if (Config::kHasRope && rope != 0) {
        const uint32_t narrow =
            ((rope & ~1u) ^ (turn % 2 * (kSwizzle64RowBytes / 2))) + turn * 4 * kSwizzle64RowBytes;
        copy_async_16_or_zero(narrow, source + ((rope & 1u) == 0 ? rope_bytes(0) : rope_bytes(1)), take, l2_policy);
      }
    }
    if (own_thread() % 32 == 0) {
      storage.valid[own_thread() / 32] = static_cast<uint16_t>(valid_lanes);
      storage.full.arrive();
    }
    storage.full.arrive_after_copies();
  }

  // How far behind a CTA's first column of a row its columns of the RoPE lie.
  static __device__ __forceinline__ constexpr int32_t rope_bytes(int rank) {
    return (Config::kDV + rank * (Config::kRopeColumns - Config::kColumns)) * 2;
  }

  // The same number, which has to be worked out here.
  template <typename Number>
  static __device__ __forceinline__ Number kept(Number number) {
    return __shfl_sync(0xffffffffu, number, threadIdx.x % 32);
  }
  static __device__ __forceinline__ const uint8_t* kept(const uint8_t* pointer) {
    return reinterpret_cast<const uint8_t*>(kept(reinterpret_cast<unsigned long long>(pointer)));
  }

  __device__ __forceinline__ void load_heads(const QueryPosition& query, int32_t head_block, const TensorMap& q_map,
                                             const TensorMap& dout_map, const TensorMap& rope_map) {
    if (own_thread() == 0) {
      constexpr uint32_t kRope = Config::kHasRope ? sizeof(storage.q_rope) : 0;
      storage.heads_full.arrive_and_expect(sizeof(storage.q) + sizeof(storage.dout) + kRope);
      for (int run = 0; run < Config::kHeads / Config::kHeadTile; ++run) {
        const int32_t head = head_of_place<Config>(head_block, run * Config::kHeadTile);
        const int rows = run * Config::kHeadTile * static_cast<int>(kSwizzleRowBytes);
        for (int tile = 0; tile < Config::kValueTiles; ++tile) {
          const int32_t column = first_column() + tile * Config::kTileColumns;
          tma_load_4d(storage.q[tile] + rows, q_map, storage.heads_full, column, head, query.query, query.batch);
          tma_load_4d(storage.dout[tile] + rows, dout_map, storage.heads_full, column, head, query.query, query.batch);
        }
        if constexpr (Config::kHasRope) {
          tma_load_4d(storage.q_rope + run * Config::kHeadTile * Config::kRopeRowBytes, rope_map, storage.heads_full,
                      first_rope_column(), head, query.query, query.batch);
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace cupymla::sparse_mla_bwd
