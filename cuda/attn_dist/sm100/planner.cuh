// The planner: one warp of the leader, which walks through the queries of its CTAs and describes each head block to all
// of them, a few head blocks ahead of the others. It alone reads how many entries a query has: if topk_length or
// indices changed under way and each CTA planned for itself, they would wait for blocks that never come.
#pragma once

#include "../../common/cluster.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace cupymla::attn_dist {

template <typename Config>
struct Planner {
  Storage<Config>& storage;
  const Parameters& params;
  const int lane = threadIdx.x % 32;
  Ring<Config::kHeadBlocks> ring;

  __device__ __forceinline__ Planner(Storage<Config>& storage, const Parameters& params)
      : storage(storage), params(params) {}

  // Queries, or slices of them, are assigned to the clusters of the grid in turn.
  __device__ __forceinline__ void run() {
    const uint32_t slices = params.slices, items = params.queries * slices;
    const uint32_t clusters = gridDim.x / Config::kCtas;
    for (uint32_t item = blockIdx.x / Config::kCtas; item < items; item += clusters) {
      describe_query(item / slices, static_cast<int32_t>(item % slices));
    }
    publish(make_int4(-1, 0, 0, 0));
  }

  __device__ __forceinline__ void describe_query(uint32_t index, int32_t slice) {
    using Query = SparseQuery<Config::kTileKeys>;
    // From one lane: nothing promises that all lanes read the same.
    const int32_t entries = __shfl_sync(0xffffffffu, Query::read_entries(params, QueryPosition(params, index)), 0);
    const Query query(params, index, entries);
    const int32_t row_blocks = (params.topk + Config::kTileKeys - 1) / Config::kTileKeys;
    const int32_t begin = slice * params.slice_blocks, row_end = min(begin + params.slice_blocks, row_blocks);
    HeadBlock head_block{0,
                         0,
                         begin,
                         max(begin, min(query.blocks, row_end)),
                         row_end,
                         query.batch,
                         query.query,
                         params.lse + query.batch * params.lse_batch + query.query * params.lse_query,
                         params.dist + query.batch * params.dist_batch + query.query * params.dist_query,
                         sm100::QueryEntries(params, query)};
    drop_invalid_end(head_block);
    for (; head_block.first_head < params.h_q; head_block.first_head += Config::kHeads) {
      head_block.heads = min(params.h_q - head_block.first_head, Config::kHeads);
      publish(head_block);
      if (head_block.empty()) break;
    }
  }

  // Takes blocks without a valid entry from the end: selections are often padded there.
  __device__ __forceinline__ void drop_invalid_end(HeadBlock& head_block) const {
    for (; !head_block.empty(); --head_block.end_block) {
      bool valid = false;
#pragma unroll
      for (int i = 0; i < Config::kTileKeys / 32; ++i) {
        const int32_t entry = (head_block.end_block - 1) * Config::kTileKeys + i * 32 + lane;
        valid |= head_block.entries.is_valid(head_block.entries.token(entry));
      }
      if (__any_sync(0xffffffffu, valid)) break;
    }
  }

  // A head block, or as much of its beginning as it takes to say that there are no more. A lane for each CTA.
  template <typename Description>
  __device__ __forceinline__ void publish(const Description& description) {
    storage.head_block_free[ring.stage].wait(ring.free());
    // A lane that has not looked yet would find the next phase begun, once others have read this description.
    __syncwarp();
    if (lane < Config::kCtas) {
      constexpr uint32_t kPieces = sizeof(Description) / sizeof(uint4);
      uint4 pieces[kPieces];
      memcpy(pieces, &description, sizeof(Description));
      const uint32_t place = cluster_address(smem_address(&storage.head_block[ring.stage]), lane);
      const uint32_t full = cluster_address(smem_address(&storage.head_block_full[ring.stage].state), lane);
      cluster_arrive_and_expect_at(full, sizeof(Description));
#pragma unroll
      for (uint32_t i = 0; i < kPieces; ++i) {
        cluster_store_async_float4(place + i * static_cast<uint32_t>(sizeof(uint4)), __uint_as_float(pieces[i].x),
                                   __uint_as_float(pieces[i].y), __uint_as_float(pieces[i].z),
                                   __uint_as_float(pieces[i].w), full);
      }
    }
    __syncwarp();
    ring.advance();
  }
};

}  // namespace cupymla::attn_dist
