// The producer warpgroup of the kernel `p_ds`: Q and dO, the selected KV rows column tile by column tile, and what
// the query adds to the sink's gradient.
#pragma once

#include "../../common/async_copy.cuh"
#include "../../common/registers.cuh"
#include "../../common/ring.cuh"
#include "../../common/sparse_query.cuh"
#include "../../common/tma.cuh"
#include "../sink.cuh"
#include "p_ds_storage.cuh"

namespace cupymla::sparse_mla_bwd {

// Each warp serves 32 entries of a key tile: a lane knows the token of one, and in each of eight turns eight lanes copy
// 128 bytes of a row.
template <typename Config>
struct PdsProducer {
  static constexpr int kWarpKeys = 32;
  static constexpr int kTurns = kWarpKeys / 4;
  static constexpr uint32_t kOccupied = 3;  // named barrier
  static_assert(Config::kTileKeys == Config::kWarps * kWarpKeys);

  PdsStorage<Config>& storage;
  const Parameters& params;
  const SparseQuery<Config::kTileKeys>& query;
  const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint64_t l2_policy = l2_policy_evict_last();
  Ring<Config::kStages> ring;
  uint32_t named = 0;  // valid entries of this warp, any of them

  __device__ __forceinline__ void load_heads(int32_t first_head, const TensorMap& q_map, const TensorMap& dout_map) {
    if (warp == 0 && lane == 0) {
      for (int part = 0; part < Config::kHeadParts; ++part) {
        const int begin = part * Config::kPartTiles;
        const int end = min(begin + Config::kPartTiles, Config::kKeyTiles);
        const int values_end = min(end, Config::kValueTiles);
        Mbarrier& full = storage.heads_full[part];
        full.arrive_and_expect((end - begin + values_end - begin) * Config::kHeadTileBytes);
        for (int tile = begin; tile < end; ++tile) {
          const int32_t column = tile * Config::kTileColumns;
          tma_load_4d(storage.q[tile], q_map, full, column, first_head, query.query, query.batch);
          if (tile < values_end) {
            tma_load_4d(storage.dout[tile], dout_map, full, column, first_head, query.query, query.batch);
          }
        }
      }
    }
    __syncwarp();
  }

  // An ordinary load: in the place of indices there may be lists that the kernel before has written.
  __device__ __forceinline__ int32_t load_token(int32_t key_tile) const {
    const int32_t* indices = params.indices + query.batch * params.indices_batch + query.query * params.indices_query;
    const int32_t entry = key_tile * Config::kTileKeys + static_cast<int32_t>(warp * kWarpKeys + lane);
    return entry < query.entries ? indices[entry] : -1;
  }

  __device__ __forceinline__ void run() {
    int32_t token = load_token(0);
    for (int32_t key_tile = 0; key_tile < query.blocks; ++key_tile) {
      const int32_t next = load_token(key_tile + 1);
      fill(token, key_tile % Config::kWordSets);
      token = next;
    }
  }

  __device__ __forceinline__ void fill(int32_t token, int set) {
    const bool is_valid = static_cast<uint32_t>(token) < query.token_limit;
    const uint32_t valid = __ballot_sync(0xffffffffu, is_valid);
    named |= valid;
    const uint8_t* rows = params.kv + query.batch * params.kv_batch_bytes + lane % 8 * 16;
    make_opaque(rows);  // so that each row's offset is added to it in one instruction
    const uint8_t* source[kTurns];
    uint32_t place[2];  // within a tile; rows eight apart are swizzled alike
#pragma unroll
    for (int order = 0; order < kTurns; ++order) {
      const uint32_t entry = order * 4 + lane / 8;
      const uint32_t row = __shfl_sync(0xffffffffu, token, entry);
      source[order] = rows + static_cast<int64_t>((valid >> entry & 1u) != 0 ? row : 0u) * params.kv_token_bytes;
      if (order < 2) place[order] = swizzle_128(warp * kWarpKeys + entry, lane % 8);
    }
#pragma unroll
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      storage.free[ring.stage].wait(ring.free());
      if (lane == 0) {
        if (tile == 0) storage.valid[set][warp] = valid;
        storage.full[ring.stage].arrive();
      }
      // Through a reduction, for what is told of `KeyBuffer::address` in producer.cuh.
      const uint32_t stage = __reduce_max_sync(0xffffffffu, smem_address(storage.k[ring.stage]));
      uint32_t destination[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        destination[i] = place[i] + stage;
        make_opaque(destination[i]);
      }
#pragma unroll
      for (int order = 0; order < kTurns; ++order) {
        copy_async_16_or_zero(destination[order % 2] + order / 2 * kSwizzleAtomBytes,
                              source[order] + tile * static_cast<int>(kSwizzleRowBytes),
                              (valid >> (order * 4 + lane / 8) & 1u) != 0, l2_policy);
      }
      storage.full[ring.stage].arrive_after_copies();
      ring.advance();
    }
  }

  // What the query adds to d_sink, by a thread for each head; nothing where no entry was valid.
  __device__ __forceinline__ void store_sink_terms(int32_t first_head) {
    if (params.sink_terms == nullptr) return;
    if (lane == 0 && named != 0) atomicOr(&storage.occupied, 1u);
    named_barrier_sync(kOccupied, Config::kWarpgroup);
    storage.statistics_out.wait(0);
    const int32_t own = static_cast<int32_t>(warp * 32 + lane), head = first_head + own;
    if (own < Config::kHeads && head < params.h_q) {
      store_sink_term(params, query, head, storage.occupied != 0, storage.delta[own]);
    }
  }
};

}  // namespace cupymla::sparse_mla_bwd
