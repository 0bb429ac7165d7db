// The values warpgroup of the small-head variant: the output of every block, a value channel per accumulator row, a
// head per column, and its way to global memory.
#pragma once

#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "small_head_storage.cuh"
#include "merge.cuh"

namespace cupymla::sparse_mla_fwd {

template <typename Config, typename Element>
struct Values {
  using Mma = typename sm90::TransposedAtoms<Element, Config::kHeads>::Values;
  static constexpr int kSteps = Config::kTileKeys / 16;  // wgmma k steps in a block of entries
  static constexpr int kOutputs = Config::kHeads * Config::kTileColumns / Config::kWarpgroup;  // of a tile
  static constexpr int kHeadTiles = Config::kHeads / 8;  // eight heads each

  Storage<Config>& storage;
  const Parameters& params;
  const int32_t first_head;
  const int warp = (threadIdx.x / 32) % 4;
  const int lane = threadIdx.x % 32;

  float output[Config::kValueTiles][kOutputs];
  PipelineState<Config> state;        // of the next block, or Q
  Ring<Config::kHandovers> handover;  // the next one

  __device__ __forceinline__ Values(Storage<Config>& storage, const Parameters& params, int32_t first_head)
      : storage(storage), params(params), first_head(first_head) {}

  // The head of this thread's accumulator column `j`, of two in every eight (PTX ISA, "Register fragments for
  // wgmma.mma_async", matrix D).
  __device__ __forceinline__ int column_of(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }

  static __device__ __forceinline__ constexpr int end_of(int part) {
    return Config::part_begin(part + 1) < Config::kValueTiles ? Config::part_begin(part + 1) : Config::kValueTiles;
  }

  __device__ __forceinline__ void fence_operands() {
#pragma unroll
    for (int tile = 0; tile < Config::kValueTiles; ++tile) sm90::warpgroup_fence_operand(output[tile]);
  }

  // Multiplies every column by its factor. No product may be in flight.
  __device__ __forceinline__ void scale(const float (&factors)[Config::kHeads]) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + column_of(2 * n));
#pragma unroll
      for (int tile = 0; tile < Config::kValueTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          output[tile][n * 4 + i] *= factor.x;
          output[tile][n * 4 + i + 1] *= factor.y;
        }
      }
    }
  }

  // Issues output += V^T P^T of one part's channels.
  __device__ __forceinline__ void issue(int part, uint64_t p) {
    const int begin = Config::part_begin(part);
    const uint64_t v = sm90::mn_major_descriptor(smem_address(state.tile(storage, part, begin)), Config::kTileBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int tile = begin; tile < end_of(part); ++tile) {
        const uint32_t offset = (tile - begin) * Config::kTileBytes + step * 2 * kSwizzleAtomBytes;
        sm90::mma<Mma>(output[tile], sm90::descriptor_advance(v, offset), sm90::descriptor_advance(p, step * 32));
      }
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void give_back(int part) { storage.free[state.stage(part)][part].arrive(); }

  __device__ __forceinline__ void hand_back() {
    storage.p_free[handover.stage].arrive();
    handover.advance();
  }

  // One block; each part is given back as soon as its products are done. `fresh` output is zero yet.
  __device__ __forceinline__ void multiply(bool fresh) {
    const uint32_t from = handover.stage;
    if (!fresh && *reinterpret_cast<const uint32_t*>(storage.moved[from]) != 0) scale(storage.factor[from]);
    const uint64_t p = sm90::k_major_descriptor(smem_address(storage.p[from]));
    fence_operands();
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      sm90::wgmma_fence();
      issue(part, p);
      if (part > 0) {
        sm90::wgmma_wait<1>();
        give_back(part - 1);
      }
    }
    sm90::wgmma_wait<0>();
    fence_operands();
    give_back(Config::kParts - 1);
    hand_back();
    state.advance();
  }

  // Goes through all blocks of a query; the end's handover is left.
  __device__ __forceinline__ void accumulate() {
#pragma unroll
    for (int tile = 0; tile < Config::kValueTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[tile][i] = 0.f;
    }
    state.advance();   // Q's
    bool fresh = Config::kSkipsFresh;
    while (true) {
      storage.p_ready[handover.stage].wait(handover.full);
      if (storage.is_end[handover.stage]) return;
      multiply(fresh);
      fresh = false;
    }
  }

  // Each thread has two heads of two channels of every tile. Tiles of eight by eight are transposed, so that it has two
  // channels of one head, and the four lanes of a head exchange them: sixteen bytes each, 32 bytes side by side.
  __device__ __forceinline__ void store_result(const Query& query) {
    scale(storage.factor[handover.stage]);
    hand_back();

    const int quad_lane = lane % 4;
    const int channel = quad_lane / 2 * Config::kTileColumns + warp * 16 + quad_lane % 2 * 8;
    uint8_t* base = params.out + query.batch * params.out_batch_bytes + query.query * params.out_query_bytes +
                    channel * 2;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      const int head = first_head + n * 8 + lane / 4;
      uint8_t* line = base + head * params.out_head_bytes;
#pragma unroll
      for (int tile = 0; tile < Config::kValueTiles; tile += 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& pair = output[tile + i / 2];
          const int at = n * 4 + i % 2 * 2;
          words[i] = transpose_matrix(pack_pair<Element>(pair[at], pair[at + 1]));
        }
        quad_transpose(words, quad_lane);
        if (head < params.h_q) {
          *reinterpret_cast<uint4*>(line + tile * Config::kTileColumns * 2) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // Leaves the output for the CTAs of the cluster.
  __device__ __forceinline__ void leave() {
    hand_back();
    meet_behind_tiles(storage);
    auto& left = leavings(storage);
#pragma unroll
    for (int tile = 0; tile < Config::kValueTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const int channel = tile * Config::kTileColumns + warp * 16 + lane / 4 + i / 2 % 2 * 8;
        left.output[column_of(i / 4 * 2 + i % 2)][channel] = output[tile][i];
      }
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
