// The planner warp: walks through the queries of its CTAs and describes each pass, a few passes ahead of the others.
// Both CTAs of a pair do the same.
#pragma once

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
    storage.pass_free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.pass[ring.stage].first_head = -1;
      storage.pass_full[ring.stage].arrive();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void describe_query(uint32_t index, int32_t slice) {
    const SparseQuery<Config::kSlots> query(params, index);
    const int32_t row_blocks = (params.topk + Config::kSlots - 1) / Config::kSlots;
    const int32_t begin = slice * params.slice_blocks, row_end = min(begin + params.slice_blocks, row_blocks);
    Pass pass{sm100::QuerySlots(params, query),
              params.lse + query.batch * params.lse_batch + query.query * params.lse_query,
              params.dist + query.batch * params.dist_batch + query.query * params.dist_query,
              query.batch,
              query.query,
              0,
              0,
              begin,
              max(begin, min(query.blocks, row_end)),
              row_end};
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

  __device__ __forceinline__ void publish(const Pass& pass) {
    storage.pass_free[ring.stage].wait(ring.free());
    if (lane == 0) {
      storage.pass[ring.stage] = pass;
      storage.pass_full[ring.stage].arrive();
    }
    __syncwarp();
    ring.advance();
  }
};

}  // namespace cupymla::attn_dist
