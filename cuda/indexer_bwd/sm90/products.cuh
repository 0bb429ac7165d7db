// The three products of a tile of keys, and the one that is complete on return: of keys with heads.
#pragma once

#include "../../common/sm90/swizzle_64_tiles.cuh"
#include "storage.cuh"

namespace cupymla::indexer_bwd {

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

// Of a thread: rows r and r + 8 of its warp's sixteen keys, of each eight heads two.
constexpr int kScores = kHeads / 2;

// An address that the compiler knows to be the same in all lanes.
__device__ __forceinline__ uint32_t uniform_address(const void* pointer) {
  return __shfl_sync(0xffffffffu, smem_address(pointer), 0);
}

// Products of a tile's keys with all heads of the block, complete on return.
__device__ __forceinline__ void multiply_keys(float (&products)[kScores], const Storage& storage, int stage) {
  const uint64_t keys = sm90::k_major_descriptor(uniform_address(storage.keys[stage][0]));
  const uint64_t heads = sm90::k_major_descriptor(uniform_address(storage.q[0]));
  sm90::warpgroup_discard_operand(products);
  sm90::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const uint32_t column = step / 4, inside = step % 4 * 32;
    sm90::mma<Products<Element, kHeads>::Scores>(
        products, sm90::descriptor_advance(keys, column * kKeyColumnBytes + inside),
        sm90::descriptor_advance(heads, column * kHeadColumnBytes + inside), step == 0);
  }
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  sm90::warpgroup_fence_operand(products);
}

}  // namespace cupymla::indexer_bwd
