// Stages `mask` and `round`: which keys are not finite, and dk of the sums.
#pragma once

#include "../../common/memory.cuh"
#include "channels.cuh"
#include "rows.cuh"

namespace cupymla::indexer_loss_dense {

// A lane takes a key, a warp a word of bits.
__device__ __forceinline__ void mask_keys(const Parameters& params) {
  for (int64_t key = first_thread(); key < params.row_stride; key += all_threads()) {
    bool finite = true;
    if (key < params.keys) {
      const Element* row = params.k + key * params.k_key;
      for (int part = 0; part < kD; part += 8) {
        finite = finite && are_finite(__ldg(reinterpret_cast<const uint4*>(row + part)));
      }
    }
    const uint32_t bad = __ballot_sync(0xffffffffu, !finite);
    if (threadIdx.x % 32 == 0) params.bad_keys[key / 32] = bad;
  }
}

__device__ __forceinline__ void round(const Parameters& params) {
  const int64_t chunks = static_cast<int64_t>(params.keys) * (kD / 4);
  const int64_t slice = params.row_stride * kD;
  for (int64_t chunk = first_thread(); chunk < chunks; chunk += all_threads()) {
    const float* sums = params.sums + chunk * 4;
    float4 four = *reinterpret_cast<const float4*>(sums);
    for (int32_t other = 1; other < params.slices; ++other) {
      const float4 more = *reinterpret_cast<const float4*>(sums + other * slice);
      four = make_float4(four.x + more.x, four.y + more.y, four.z + more.z, four.w + more.w);
    }
    const int64_t place = chunk / (kD / 4) * params.dk_key + chunk % (kD / 4) * 4;
    uint8_t* to = params.dk + place * (params.dk_type == 2 ? 4 : 2);
    if (params.dk_type == 2) {
      *reinterpret_cast<float4*>(to) = four;
    } else if (params.dk_type == 1) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__half>(four.x, four.y), pack_pair<__half>(four.z, four.w));
    } else {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pack_pair<__nv_bfloat16>(four.x, four.y), pack_pair<__nv_bfloat16>(four.z, four.w));
    }
  }
}

}  // namespace cupymla::indexer_loss_dense
