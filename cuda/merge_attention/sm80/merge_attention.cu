// Attention over parts of the keys into attention over all of them. A thread has eight channels of a head; it reads the
// head's log-sum-exps itself, which its neighbours find in the cache. What is computed: `merge_attention` in
// cupymla/ops/merge_attention/reference.py. There is no shared memory and no barrier.
#include "../../common/entry.cuh"
#include "../../common/math.cuh"
#include "../../common/types.cuh"
#include "../../mla_cache/sm80/floats.cuh"
#include "params.cuh"

namespace cupymla::merge_attention {

constexpr int kThreads = 256;

using mla_cache::kChannels;

// A head of a row.
struct Head {
  int64_t places[kAxes];

  __device__ __forceinline__ int64_t offset(const int64_t (&strides)[kAxes]) const {
    return places[0] * strides[0] + places[1] * strides[1] + places[2] * strides[2];
  }
};

// NaN is no empty part: it goes on into the results.
__device__ __forceinline__ bool is_empty(float lse) { return fabsf(lse) == positive_infinity(); }

}  // namespace cupymla::merge_attention

extern "C" __global__ void __launch_bounds__(cupymla::merge_attention::kThreads)
    merge_attention(const __grid_constant__ cupymla::merge_attention::Parameters params) {
  using namespace cupymla;
  using namespace cupymla::merge_attention;
  const int32_t pieces = params.d_v / kChannels;
  const int64_t total = params.rows * params.heads * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const float factor = params.base2 != 0 ? 1.0f : kLog2e;
  const int32_t item_bytes = mla_cache::item_bytes(params.type);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t number = quotient(i, pieces), row = quotient(number, params.heads);
    const int64_t outer = quotient(row, params.inner);
    const int32_t channel = static_cast<int32_t>(i - number * pieces) * kChannels;
    const int64_t head = number - row * params.heads;
    const Head place{{outer, row - outer * params.inner, head}};
    const float* const lses = params.lses + place.offset(params.lses_strides);

    float most = negative_infinity();
    for (int32_t part = 0; part < params.parts; ++part) {
      const float lse = __ldg(lses + part * params.lses_part);
      if (!is_empty(lse)) most = max_nan(most, lse);
    }
    const bool is_nothing = most == negative_infinity();
    float sink = negative_infinity();
    if (params.attn_sink != nullptr) {
      sink = __ldg(params.attn_sink + head * params.attn_sink_head) * (params.base2 != 0 ? kLog2e : 1.0f);
    }
    // Weights are relative to the larger of the scores' and the sink's, sums for lse to the scores' alone.
    const float top = max_nan(most, sink);
    float sum = 0.0f, below = 0.0f, values[kChannels] = {};
    const uint8_t* outs = params.outs + (place.offset(params.outs_strides) + channel) * item_bytes;
#pragma unroll 4
    for (int32_t part = 0; part < params.parts; ++part) {
      const float lse = __ldg(lses + part * params.lses_part);
      if (is_empty(lse)) continue;
      const float weight = exp2_approx((lse - top) * factor);
      sum += exp2_approx((lse - most) * factor);
      below += weight;
      float added[kChannels];
      mla_cache::load_channels(added, outs + part * params.outs_part * item_bytes, params.type);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) values[c] = fmaf(weight, added[c], values[c]);
    }
    if (sink != negative_infinity()) below += exp2_approx((sink - top) * factor);
    const bool is_zero = is_nothing || sink == positive_infinity();
    const float inverse = __fdiv_rn(1.0f, below);
#pragma unroll
    for (float& value : values) value = is_zero ? 0.0f : value * inverse;
    const int64_t target = place.offset(params.out_strides) + channel;
    mla_cache::store_channels(params.out + target * item_bytes, values, params.type);
    if (channel != 0) continue;
    const float logarithm = log2f(sum) * (params.base2 != 0 ? 1.0f : kLn2);
    params.lse[place.offset(params.lse_strides)] = is_nothing ? positive_infinity() : most + logarithm;
  }
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::merge_attention::kThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::merge_attention::Parameters));
