// One thread gives the Tensor Core its work: scales to Tensor Memory, then four products per stage.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/sm100/block_scaled.cuh"
#include "../../common/sm100/tcgen05.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

template <class C>
__device__ __forceinline__ void multiply(Storage<C>& storage, uint32_t tmem, const Slice<C>& slice) {
  Ring<C::kStages> ring;
  for (uint32_t chunk = slice.first; chunk < slice.end; ++chunk) {
    const uint32_t stage = ring.stage;
    storage.full[stage].wait(ring.full);
    storage.ready[stage].wait(ring.full);
    // Every stage has columns of its own, so copies need not wait for products of the stage before.
    const uint32_t a_scales = tmem + C::kSumColumns + stage * 2 * C::kScaleColumns;
    const uint32_t b_scales = a_scales + C::kScaleColumns;
#pragma unroll
    for (uint32_t block = 0; block < C::kScaleBlocks; ++block) {
      sm100::copy_scales(a_scales + 4 * block, sm100::descriptor_16b(smem_address(storage.a_scales[stage][block])));
      sm100::copy_scales(b_scales + 4 * block,
                         sm100::descriptor_16b(smem_address(storage.b_scales[stage].blocks[block])));
    }
    const uint64_t a = sm100::descriptor_128b(smem_address(storage.a[stage]));
    const uint64_t b = sm100::descriptor_128b(smem_address(storage.b[stage]));
    const uint32_t turn = chunk - slice.first;
    const uint32_t sums = tmem + turn % C::kAccumulators * C::kColumns;
#pragma unroll
    for (uint32_t product = 0; product < C::kProducts; ++product) {
      const bool accumulate = turn >= C::kAccumulators || product != 0;
      const uint32_t block = product * C::kScaleBlocks / C::kProducts * 4;
      if constexpr (C::kMxfp4) {
        const uint32_t instruction = sm100::instruction_e2m1(C::kTileRows, C::kColumns, true, product % 2 * 2);
        sm100::mma_mxfp4(sums, a + 2 * product, b + 2 * product, instruction, a_scales + block, b_scales + block,
                         accumulate);
      } else {
        constexpr uint32_t kInstruction = sm100::instruction_e2m1(C::kTileRows, C::kColumns, false, 0);
        sm100::mma_nvfp4(sums, a + 2 * product, b + 2 * product, kInstruction, a_scales + block, b_scales + block,
                         accumulate);
      }
    }
    sm100::commit(storage.empty[stage]);
    ring.advance();
  }
  sm100::commit(storage.done);
}

}  // namespace cupymla::nvfp4_gemv
