// The wgmma shapes of a cluster's products.
#pragma once

#include "../../common/sm90/swizzle_64_tiles.cuh"

namespace cupymla::sparse_mla_bwd {

using sm90::Major;

// Scores: entries x heads. QueryWide, QueryNarrow: dQ, heads x columns of the values and the RoPE, where both operands
// are read across their rows. Key, KeyNarrow: dKV, entries x columns.
template <typename Element>
struct ClusterAtoms;

template <>
struct ClusterAtoms<__nv_bfloat16> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
  using QueryWide = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<Major::MN, Major::MN>;
  using QueryNarrow = cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<Major::MN, Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using KeyNarrow = cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_SS<Major::K, Major::MN>;
};

template <>
struct ClusterAtoms<__half> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
  using QueryWide = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<Major::MN, Major::MN>;
  using QueryNarrow = cute::SM90::GMMA::MMA_64x32x16_F32F16F16_SS<Major::MN, Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::MN>;
  using KeyNarrow = cute::SM90::GMMA::MMA_64x16x16_F32F16F16_SS<Major::K, Major::MN>;
};

}  // namespace cupymla::sparse_mla_bwd
