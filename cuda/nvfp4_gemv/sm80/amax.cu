// The largest finite magnitude of a matrix, one value per CTA.
#include "../../common/entry.cuh"
#include "../../common/grid_dependency.cuh"
#include "conversion_params.cuh"
#include "../floats.cuh"
#include "places.cuh"

namespace cupymla::nvfp4_gemv {

constexpr int kThreads = 256;
constexpr int kSpan = 8;  // elements that a thread looks at before it moves on

__device__ __forceinline__ float largest_finite(const AmaxParameters& params) {
  float amax = 0.0f;
  const int64_t spans = (params.k + kSpan - 1) / kSpan;
  for (int64_t i = first_number(); i < spans * params.m * params.batches; i += number_step()) {
    const Place place(i, params.m, spans);
    const int64_t start = place.batch * params.x_batch + place.row * params.x_row;
#pragma unroll
    for (int e = 0; e < kSpan; ++e) {
      const int64_t element = place.column * kSpan + e;
      if (element < params.k) {
        const float magnitude = fabsf(load_float(params.x, start + element, params.type));
        if (magnitude <= 3.402823466e38f) amax = fmaxf(amax, magnitude);
      }
    }
  }
  return amax;
}

}  // namespace cupymla::nvfp4_gemv

extern "C" __global__ void __launch_bounds__(cupymla::nvfp4_gemv::kThreads)
    nvfp4_amax(const __grid_constant__ cupymla::nvfp4_gemv::AmaxParameters params) {
  using namespace cupymla::nvfp4_gemv;
  __shared__ float warps[kThreads / 32];
  cupymla::griddepcontrol_launch_dependents();
  float amax = largest_finite(params);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) amax = fmaxf(amax, warps[warp]);
    params.partial[blockIdx.x] = amax;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::nvfp4_gemv::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::nvfp4_gemv::AmaxParameters),
                     span = cupymla::nvfp4_gemv::kSpan);
