// Products of 64 gathered index keys with the heads of a query, each in tiles of 64 swizzled channels.
#pragma once

#include "swizzle_64_tiles.cuh"

namespace cupymla::indexer {

// `Scores`: 64 keys with kColumns heads, sixteen channels a step. `Transposed`: 64 channels with kColumns heads,
// sixteen keys a step. `FromRegisters`: 64 keys with kColumns channels, sixteen heads a step.
template <typename Element, int kColumns>
struct Products;
#define CUPYMLA_PRODUCTS(element, name, columns)                                                                \
  template <>                                                                                                   \
  struct Products<element, columns> {                                                                           \
    using Scores = cute::SM90::GMMA::MMA_64x##columns##x16_##name##_SS<sm90::Major::K, sm90::Major::K>;         \
    using Transposed = cute::SM90::GMMA::MMA_64x##columns##x16_##name##_SS<sm90::Major::MN, sm90::Major::K>;    \
    using FromRegisters = cute::SM90::GMMA::MMA_64x##columns##x16_##name##_RS<sm90::Major::K, sm90::Major::MN>; \
  };
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 16)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 32)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 64)
CUPYMLA_PRODUCTS(__nv_bfloat16, F32BF16BF16, 128)
CUPYMLA_PRODUCTS(__half, F32F16F16, 16)
CUPYMLA_PRODUCTS(__half, F32F16F16, 32)
CUPYMLA_PRODUCTS(__half, F32F16F16, 64)
CUPYMLA_PRODUCTS(__half, F32F16F16, 128)
#undef CUPYMLA_PRODUCTS

// An address that the compiler knows to be the same in all lanes.
__device__ __forceinline__ uint32_t uniform_address(const void* pointer) {
  return __shfl_sync(0xffffffffu, smem_address(pointer), 0);
}

// Products of a tile's keys with all heads, complete on return; `meanwhile` is done while they are under way. A thread
// has rows r and r + 8 of its warp's sixteen keys, r = lane / 4, and of each eight heads two.
template <typename Element, int kTiles, uint32_t kKeyBytes, uint32_t kHeadBytes, int kScores, typename Meanwhile>
__device__ __forceinline__ void multiply_keys(float (&products)[kScores], const uint8_t (&keys)[kTiles][kKeyBytes],
                                              const uint8_t (&heads)[kTiles][kHeadBytes], const Meanwhile& meanwhile) {
  const uint64_t of_keys = sm90::k_major_descriptor(uniform_address(keys[0]));
  const uint64_t of_heads = sm90::k_major_descriptor(uniform_address(heads[0]));
  sm90::warpgroup_discard_operand(products);
  sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTiles * 4; ++step) {
    const uint32_t column = step / 4, inside = step % 4 * 32;
    sm90::mma<typename Products<Element, kScores * 2>::Scores>(
        products, sm90::descriptor_advance(of_keys, column * kKeyBytes + inside),
        sm90::descriptor_advance(of_heads, column * kHeadBytes + inside), step == 0);
  }
  sm90::wgmma_commit();
  meanwhile();
  sm90::wgmma_wait<0>();
  sm90::warpgroup_fence_operand(products);
}

template <typename Element, int kTiles, uint32_t kKeyBytes, uint32_t kHeadBytes, int kScores>
__device__ __forceinline__ void multiply_keys(float (&products)[kScores], const uint8_t (&keys)[kTiles][kKeyBytes],
                                              const uint8_t (&heads)[kTiles][kHeadBytes]) {
  multiply_keys<Element>(products, keys, heads, [] {});
}

}  // namespace cupymla::indexer
