// Shared memory, and who waits for what. The course of a CTA and its barriers are drawn in ../README.md.
#pragma once

#include "../../common/barrier.cuh"
#include "config.cuh"

namespace cupymla::nvfp4_gemv {

// Scales of b of one stage. A copy of a block to Tensor Memory takes 512 bytes, of which only the rows of columns
// count. The others lie in the same stage or behind it, where nobody writes meanwhile.
template <class C>
struct VectorScales {
  uint8_t blocks[C::kScaleBlocks][C::kVectorBlockBytes];
  uint8_t behind[C::kScaleBlockBytes - C::kVectorBlockBytes];
};

template <class C>
struct alignas(1024) Storage {
  uint8_t a[C::kStages][C::kTileRows * C::kRowBytes];  // rows of 128 bytes, swizzled by 128 bytes
  uint8_t b[C::kStages][C::kColumns * C::kRowBytes];   // the same
  uint8_t a_scales[C::kStages][C::kScaleBlocks][C::kScaleBlockBytes];
  VectorScales<C> b_scales[C::kStages];

  Mbarrier full[C::kStages];   // 1 arrival and a stage's bytes: the stage is in
  Mbarrier ready[C::kStages];  // an arrival of each warp that checks: its scales are what the Tensor Core takes
  Mbarrier empty[C::kStages];  // a commit: the stage has been multiplied
  Mbarrier done;               // a commit: all stages have been multiplied
  uint32_t tmem;

  // This CTA's sums [row][column], where stage 0 was.
  __device__ __forceinline__ float* partial() { return reinterpret_cast<float*>(a[0]); }

  static_assert(sizeof(VectorScales<C>) % 128 == 0, "where TMA may write");
  static_assert(sizeof(float) * C::kTileRows * C::kColumns <= sizeof(a[0]));
};

// Two CTAs on a multiprocessor, each with 1 KB of the system's.
template <class C>
constexpr bool kFitsTwice = 2 * (sizeof(Storage<C>) + 1024) <= 228 * 1024;

}  // namespace cupymla::nvfp4_gemv
