// Scales of a, asked into L2 as one piece of memory before the stream comes by.
#pragma once

#include "../../common/bulk_prefetch.cuh"
#include "work.cuh"

namespace cupymla::nvfp4_gemv {

// What a CTA may ask for at a time: with 132 of them 21 MB, which L2 keeps beside the stream.
constexpr int64_t kMostScalesAhead = 160 * 1024;

// Of a pass's rows, where linear scales have no gaps; each warp asks for its share. The stream reads 16 bytes of a row
// at a time, rows apart, which DRAM takes longer for.
template <class C>
__device__ __forceinline__ void ask_for_scales(const Parameters& params, const Pass<C>& pass, int32_t warp) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const int64_t bytes = pass.rows * params.sfa_row_bytes;
  const bool whole = params.sfa_access == kScalesByRows && params.sfa_row_bytes == (params.k + C::kBlock - 1) / C::kBlock;
  if (!whole || bytes > kMostScalesAhead || threadIdx.x % 32 != 0) return;
  const uint8_t* start = params.sfa + pass.batch * params.sfa_batch_bytes + pass.first_row * params.sfa_row_bytes;
  // MXFP4's rows begin at multiples of 8, so up to 8 bytes at either end are left out.
  const int64_t skipped = reinterpret_cast<uintptr_t>(start) & 15u ? 16 - (reinterpret_cast<uintptr_t>(start) & 15u) : 0;
  const uint32_t pieces = static_cast<uint32_t>(bytes - skipped) / 16, share = (pieces + C::kWarps - 1) / C::kWarps;
  const uint32_t first = warp * share;
  if (bytes < skipped || first >= pieces) return;
  bulk_prefetch_l2(start + skipped + first * 16, min(share, pieces - first) * 16);
#endif
}

}  // namespace cupymla::nvfp4_gemv
