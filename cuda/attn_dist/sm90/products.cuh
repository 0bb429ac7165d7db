// What a consumer warpgroup multiplies: 64 rows of Q, which lie in its registers, with the keys of a block.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "../../common/barrier.cuh"
#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::attn_dist {

// `Config` gives tiles and entries of a block; a row of Q is a head of a query.
template <typename Config, typename Element>
struct Products {
  static constexpr int kScores = Config::kConsumerHeads * Config::kTileKeys / Config::kWarpgroup;
  static constexpr int kSteps = Config::kDQk / 16;

  uint32_t q[kSteps][4];  // this thread's fragments of 64 rows

  // Takes in the rows of Q that lie in `tiles` as a block of KV would.
  __device__ __forceinline__ void load(const uint8_t* tiles, int warp, int lane) {
    const uint32_t base = smem_address(tiles);
    const uint32_t matrix_row = warp % 4 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_matrix_x4(q[step], base + step / 4 * Config::kTileBytes + swizzle_128(matrix_row, step % 4 * 2 + lane / 16));
    }
    // TMA may be the next to write here.
    fence_async_shared();
  }

  // Issues scores = Q K^T of the block in `tiles`, which is there, behind a proxy fence; `issued(tile)` is called
  // behind each tile of columns. ptxas counts products from fence to fence, committed
  // or not, when it makes a wait of `wgmma_wait`: with fewer groups than fences a wait would be for more than it says.
  template <typename Issued>
  __device__ __forceinline__ void issue(float (&scores)[kScores], uint64_t keys, Issued issued) const {
    sm90::warpgroup_fence_operand(scores);
#pragma unroll
    for (int tile = 0; tile < Config::kKeyTiles; ++tile) {
      if (tile == 0 || Config::ends_group(tile - 1)) sm90::wgmma_fence();
      multiply(scores, keys, tile);
      if (Config::ends_group(tile)) sm90::wgmma_commit();
      issued(tile);
    }
  }

  // The descriptor of a block's keys. It is the same in all lanes, which lets those of its tiles be computed once per
  // warp; where consumers take turns it is made before a turn begins.
  static __device__ __forceinline__ uint64_t descriptor(const uint8_t* tiles) {
    return sm90::k_major_descriptor(__shfl_sync(0xffffffffu, smem_address(tiles), 0));
  }

  __device__ __forceinline__ void multiply(float (&scores)[kScores], uint64_t keys, int tile) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint64_t columns = sm90::descriptor_advance(keys, tile * Config::kTileBytes + step * 32);
      sm90::mma<typename sm90::Atoms<Element>::ScoresFromRegisters>(scores, q[tile * 4 + step], columns,
                                                                    tile == 0 && step == 0);
    }
  }
};

}  // namespace cupymla::attn_dist
