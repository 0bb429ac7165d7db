// One thread brings stages in by TMA. What lies outside the arrays reads as zero, so every stage has the same bytes.
#pragma once

#include "../../common/ring.cuh"
#include "../../common/async_copy.cuh"
#include "../../common/tma.cuh"
#include "storage.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// Maps, innermost dimension first: codes [byte of a row][row][batch][1]; scales of a [half word of a block][block of k]
// [block of rows][batch]; scales of b [half word of a block][block of k][batch][1].
struct Maps {
  const TensorMap &a, &a_scales, &b, &b_scales;
};

template <class C>
__device__ __forceinline__ void load(Storage<C>& storage, const Maps& maps, const Slice<C>& slice) {
  const uint64_t once = l2_policy_evict_first();
  const auto tile = static_cast<int32_t>(slice.tile), batch = static_cast<int32_t>(slice.batch);
  Ring<C::kStages> ring;
  for (uint32_t chunk = slice.first; chunk < slice.end; ++chunk) {
    const uint32_t stage = ring.stage;
    Mbarrier& full = storage.full[stage];
    const auto byte = static_cast<int32_t>(chunk * C::kRowBytes), block = static_cast<int32_t>(chunk * C::kScaleBlocks);
    storage.empty[stage].wait(ring.free());
    full.arrive_and_expect(C::kStageBytes);
    tma_load_4d(storage.a[stage], maps.a, full, byte, tile * static_cast<int32_t>(C::kTileRows), batch, 0, once);
    tma_load_4d(storage.a_scales[stage], maps.a_scales, full, 0, block, tile, batch, once);
    tma_load_4d(storage.b[stage], maps.b, full, byte, 0, batch, 0);
    tma_load_4d(storage.b_scales[stage].blocks, maps.b_scales, full, 0, block, batch, 0);
    ring.advance();
  }
}

}  // namespace cupymla::nvfp4_gemv
