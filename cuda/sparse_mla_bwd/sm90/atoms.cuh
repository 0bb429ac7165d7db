// The wgmma shapes of the backward's five products.
#pragma once

#include "../../common/sm90/wgmma.cuh"

namespace cupymla::sparse_mla_bwd {

using sm90::Major;

// Scores: heads x entries. QueryWide, QueryNarrow: dQ, heads x columns. Key: dKV, entries x columns, where both
// operands are read across their rows.
template <typename Element>
struct Atoms;

template <>
struct Atoms<__nv_bfloat16> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
  using QueryWide = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using QueryNarrow = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<Major::MN, Major::MN>;
};

template <>
struct Atoms<__half> {
  using Scores = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
  using QueryWide = cute::SM90::GMMA::MMA_64x256x16_F32F16F16_SS<Major::K, Major::MN>;
  using QueryNarrow = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::K, Major::MN>;
  using Key = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_SS<Major::MN, Major::MN>;
};

}  // namespace cupymla::sparse_mla_bwd
