// The end of whole calls with one vector.
#pragma once

#include "epilogue.cuh"

namespace cupymla::nvfp4_gemv {

// A thread's element of c. Where it is, alpha and bias are there before the stream is: behind it they would be waited
// for.
template <class C>
class WholeOutput {
 public:
  static_assert(C::kMostColumns == 1 && C::kThreads >= C::kPassRows);

  __device__ __forceinline__ WholeOutput(const Parameters& params, const Pass<C>& pass)
      : params_(params), splits_log2_(C::kWarpsLog2 - pass.tiles_log2) {
    const uint32_t tile = threadIdx.x / C::kTileRows, tile_row = threadIdx.x % C::kTileRows;
    const uint32_t row = tile * pass.tile_rows + tile_row;
    wanted_ = tile < 1u << pass.tiles_log2 && tile_row < pass.tile_rows && row < pass.rows;
    if (!wanted_) return;
    const int64_t batch = pass.batch, c_row = pass.first_row + row;
    alpha_ = params.alpha_value;
    if (params.alpha != nullptr) alpha_ = params.alpha[batch * params.alpha_batch + c_row * params.alpha_row];
    if (params.bias != nullptr) {
      bias_ = load_float(params.bias, batch * params.bias_batch + c_row * params.bias_row, params.out_type);
    }
    place_ = (batch * params.c_batch + c_row * params.c_row) * (params.out_type == kFloat32 ? 4 : 2);
    make_opaque(place_);
    // The page that it is in would be looked up behind the stream, too.
    prefetch_l2(params.c + place_);
    make_opaque(alpha_);
    make_opaque(bias_);
  }

  // Adds up the warps that share a tile, always in the same order. All their sums are in shared memory.
  __device__ __forceinline__ void write(const Storage<C>& storage) {
    if (!wanted_) return;
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t split = 0; split < 1u << splits_log2_; ++split) {
      sum += storage.partial[threadIdx.x / C::kTileRows + (split << (C::kWarpsLog2 - splits_log2_))]
                            [threadIdx.x % C::kTileRows][0];
    }
    // Not contracted: the bits are those of any call.
    const float value = __fadd_rn(sum * kSumUnit<C> * alpha_, bias_);
    store_float(params_.c + place_, 0, params_.out_type, value);
  }

 private:
  const Parameters& params_;
  const int32_t splits_log2_;
  bool wanted_;
  float alpha_ = 0.0f;
  float bias_ = -0.0f;  // which changes no sum
  int64_t place_ = 0;   // byte of c
};

}  // namespace cupymla::nvfp4_gemv
