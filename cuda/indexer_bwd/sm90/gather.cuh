// Copies of a query's heads and of the keys that it names. A thread waits for a group of its own.
#pragma once

#include "../../common/async_copy.cuh"
#include "query.cuh"
#include "storage.cuh"

namespace cupymla::indexer_bwd {

// Issues copies of a block of heads, and writes their weights; heads that are not there become zeros.
__device__ __forceinline__ void load_heads(Storage& storage, const Parameters& params, const Query& query,
                                           int32_t first_head, uint64_t l2_policy) {
  const Element* rows = params.q + query.batch * params.q_batch + query.query * params.q_query;
#pragma unroll 4
  for (int chunk = threadIdx.x; chunk < kHeads * kRowChunks; chunk += kThreads) {
    const int head = chunk / kRowChunks, part = chunk % kRowChunks;
    const bool there = first_head + head < params.heads;
    copy_async_16_or_zero(smem_address(storage.q[part / 8]) + swizzle_128(head, part % 8),
                          rows + (there ? first_head + head : 0) * params.q_head + part * 8, there, l2_policy);
  }
  for (int head = threadIdx.x; head < kHeads; head += kThreads) {
    storage.weights[head] = weight_of(params, query, first_head + head);
  }
}

// A thread's part in gathering tiles of keys. A warp gathers the sixteen keys whose products it gets; lanes l and
// l + 16 know which is key l of them.
struct KeyGather {
  Storage& storage;
  const Parameters& params;
  const Query& query;
  const Element* rows;  // of this batch entry
  const int64_t key_stride;
  const uint64_t l2_policy;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int32_t id = -1;  // of the entry whose copy comes next
  float gradient = 0.0f;

  __device__ __forceinline__ KeyGather(Storage& storage, const Parameters& params, const Query& query,
                                       uint64_t l2_policy)
      : storage(storage),
        params(params),
        query(query),
        rows(params.k + query.batch * params.k_batch),
        key_stride(params.k_key),
        l2_policy(l2_policy) {}

  // Reads what a tile's entries are. Nothing past the row is read.
  __device__ __forceinline__ void look(int32_t tile) {
    const int32_t entry = tile * kTileKeys + warp * 16 + lane % 16;
    id = query.key_of(entry);
    gradient = id >= 0 ? query.gradients[entry] : 0.0f;
  }

  // Issues the copies of the tile that was looked at, as one group, which is empty behind the last tile.
  __device__ __forceinline__ void issue(int32_t tile) {
    if (tile < query.tiles) {
      const int stage = tile % kStages;
      if (lane < 16) {
        storage.ids[stage][warp * 16 + lane] = id;
        storage.gradients[stage][warp * 16 + lane] = gradient;
        if constexpr (kDeterministic) {
          const int64_t key = static_cast<int64_t>(query.batch) * params.keys + max(id, 0);
          stream_copy_or_zeros<8>(smem_address(&storage.units.totals[stage][warp * 16 + lane]), params.totals + key,
                                  id >= 0 ? 8 : 0);
        }
      }
      constexpr int kRowsAtOnce = 32 / kRowChunks;
      const int part = lane % kRowChunks;
      // Of the first row. As kRowsAtOnce is a power of two, the swizzle of a row further on differs by a constant.
      const uint32_t place = smem_address(storage.keys[stage][part / 8]) +
                             swizzle_128(warp * 16 + lane / kRowChunks, part % 8);
#pragma unroll
      for (int first = 0; first < 16; first += kRowsAtOnce) {
        const int32_t key = __shfl_sync(0xffffffffu, id, first + lane / kRowChunks);
        copy_async_16_or_zero((place ^ first % 8 * 16u) + first * kSwizzleRowBytes,
                              rows + max(key, 0) * key_stride + part * 8, key >= 0, l2_policy);
      }
    }
    stream_copy_commit();
  }

  // Begins the first tiles; what was copied before belongs to the first group.
  __device__ __forceinline__ void begin() {
    look(0);
#pragma unroll 1
    for (int32_t tile = 0; tile < kStages - 1; ++tile) {
      issue(tile);
      look(tile + 1);
    }
  }

  // Waits for a tile, in all threads, and begins the one that takes the stage of the tile before it.
  __device__ __forceinline__ void next(int32_t tile) {
    stream_copy_wait<kStages - 2>();
    fence_async_shared();
    __syncthreads();
    issue(tile + kStages - 1);
    look(tile + kStages);
  }

  // Waits for the copies of this thread.
  __device__ __forceinline__ void end() {
    stream_copy_wait<0>();
  }
};

}  // namespace cupymla::indexer_bwd
