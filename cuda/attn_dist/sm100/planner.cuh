// The planner: one warp of the leader, which walks through the queries of its CTAs and describes each pass to all of
// them, a few passes ahead of the others. It alone reads how many slots a query has: if topk_length or indices changed
// under way and each CTA planned for itself, they would wait for blocks that never come.
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
  Ring<Config::kPasses> ring;

  __device__ __forceinline__ Planner(Storage<Config>& storage, const Parameters& params)
      : storage(storage), params(params) {}

  // Queries, or slices of them, are dealt to the clusters of the grid in turn.
  __device__ __forceinline__ void run() {
    const uint32_t slices = params.slices, items = params.queries * slices;
    const uint32_t clusters = gridDim.x / Config::kCtas;
    for (uint32_t item = blockIdx.x / Config::kCtas; item < items; item += clusters) {
      describe_query(item / slices, static_cast<int32_t>(item % slices));
    }
    publish(make_int4(-1, 0, 0, 0));
  }

  __device__ __forceinline__ void describe_query(uint32_t index, int32_t slice) {
    using Query = SparseQuery<Config::kSlots>;
    // From one lane: nothing promises that all lanes read the same.
    const int32_t slots = __shfl_sync(0xffffffffu, Query::read_slots(params, QueryPosition(params, index)), 0);
    const Query query(params, index, slots);
    const int32_t row_blocks = (params.topk + Config::kSlots - 1) / Config::kSlots;
    const int32_t begin = slice * params.slice_blocks, row_end = min(begin + params.slice_blocks, row_blocks);
    Pass pass{0,
              0,
              begin,
              max(begin, min(query.blocks, row_end)),
              row_end,
              query.batch,
              query.query,
              params.lse + query.batch * params.lse_batch + query.query * params.lse_query,
              params.dist + query.batch * params.dist_batch + query.query * params.dist_query,
              sm100::QuerySlots(params, query)};
    drop_invalid_end(pass);
    for (; pass.first_head < params.h_q; pass.first_head += Config::kHeads) {
      pass.heads = min(params.h_q - pass.first_head, Config::kHeads);
      publish(pass);
      if (pass.empty()) break;
    }
  }

  // Takes blocks without a valid slot from the end: selections are often padded there.
  __device__ __forceinline__ void drop_invalid_end(Pass& pass) const {
    for (; !pass.empty(); --pass.end_block) {
      bool valid = false;
#pragma unroll
      for (int i = 0; i < Config::kSlots / 32; ++i) {
        const int32_t slot = (pass.end_block - 1) * Config::kSlots + i * 32 + lane;
        valid |= pass.slots.is_valid(pass.slots.token(slot));
      }
      if (__any_sync(0xffffffffu, valid)) break;
    }
  }

  // A pass, or as much of its beginning as it takes to say that there are no more. A lane for each CTA.
  template <typename Description>
  __device__ __forceinline__ void publish(const Description& description) {
    storage.pass_free[ring.stage].wait(ring.free());
    // A lane that has not looked yet would find the next phase begun, once others have read this description.
    __syncwarp();
    if (lane < Config::kCtas) {
      constexpr uint32_t kPieces = sizeof(Description) / sizeof(uint4);
      uint4 pieces[kPieces];
      memcpy(pieces, &description, sizeof(Description));
      const uint32_t place = cluster_address(smem_address(&storage.pass[ring.stage]), lane);
      const uint32_t full = cluster_address(smem_address(&storage.pass_full[ring.stage].state), lane);
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
