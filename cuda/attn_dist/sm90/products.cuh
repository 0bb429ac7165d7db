// What a consumer warpgroup multiplies: 64 rows of Q, which lie in its registers, with the keys of a block.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>

#include "../../common/barrier.cuh"
#include "../../common/matrix.cuh"
#include "../../common/sm90/wgmma.cuh"
#include "../../common/swizzle.cuh"

namespace cupymla::attn_dist {

// Products of 64 heads, in registers, with `kColumns` keys.
template <typename Element, int kColumns>
struct Atom;
template <>
struct Atom<__nv_bfloat16, 64> : cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__nv_bfloat16, 32> : cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__half, 64> : cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K> {};
template <>
struct Atom<__half, 32> : cute::SM90::GMMA::MMA_64x32x16_F32F16F16_RS<sm90::Major::K, sm90::Major::K> {};

// `Config` gives tiles and parts of a block; a row of Q is a head of a query.
template <typename Config, typename Element>
struct Products {
  static constexpr int kScores = Config::kConsumerHeads * Config::kColumns / Config::kWarpgroup;
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

  // Issues scores = Q K^T of the block in `tiles` from row `first_row` on, part by part as its columns arrive; the
  // first part is there. Leaves a group in flight for each part. ptxas counts products from fence to fence, committed
  // or not, when it makes a wait of `wgmma_wait`: with fewer groups than fences a wait would be for more than it says.
  // `issued(part)` is called behind each part.
  template <typename Issued>
  __device__ __forceinline__ void issue(float (&scores)[kScores], const uint8_t* tiles, int first_row,
                                        Mbarrier (&full)[Config::kParts], uint32_t parity, Issued issued) const {
    // The same in all lanes, which lets the descriptors be computed once per warp.
    const uint64_t keys = sm90::k_major_descriptor(
        __shfl_sync(0xffffffffu, smem_address(tiles) + first_row * kSwizzleRowBytes, 0));
    sm90::pin_registers(scores);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      if (part > 0) full[part].wait(parity);
      fence_async_shared();
      sm90::wgmma_fence();
      multiply(scores, keys, part);
      sm90::wgmma_commit();
      issued(part);
    }
  }

  __device__ __forceinline__ void multiply(float (&scores)[kScores], uint64_t keys, int part) const {
#pragma unroll
    for (int tile = Config::part_begin(part); tile < Config::part_begin(part + 1); ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t columns = sm90::descriptor_advance(keys, tile * Config::kTileBytes + step * 32);
        sm90::mma<Atom<Element, Config::kColumns>>(scores, q[tile * 4 + step], columns, tile == 0 && step == 0);
      }
    }
  }
};

}  // namespace cupymla::attn_dist
