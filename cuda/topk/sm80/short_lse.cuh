// The log-sum-exp of a short row's selected scores, out of the memory that keeps them.
#pragma once

#include "lse.cuh"
#include "short_row.cuh"

namespace cupymla::topk {

// Combines all threads' values, of all CTAs that keep the row, in an order that is always the same.
template <typename Combine>
__device__ __forceinline__ float over_row(Exchange& exchange, Told what, float own, const Combine& combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = combine(own, __shfl_xor_sync(kAllLanes, own, step));
  const uint2* words = exchange.tell(what, make_uint2(__float_as_uint(own), 0u));
  float all = Combine::none();
  exchange.visit_words(words, [&](bool there, uint32_t, const uint2& word) {
    if (there) all = combine(all, __uint_as_float(word.x));
  });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) all = combine(all, __shfl_xor_sync(kAllLanes, all, step));
  return all;
}

// To be called behind `write_short`; +inf where nothing is selected, or +inf is.
__device__ __forceinline__ float short_lse(Exchange& exchange, const Columns& columns, const OwnScores& scores,
                                           const ShortSelection& selection, bool base2) {
  float most = MaxOf::none(), sum = 0.0f;
  const auto visit_selected = [&](const auto& visit) {
    visit_chunks(columns, [&](int chunk) {
      visit_marked(scores, chunk, bits_of_chunk(selection.own, chunk), visit);
    });
  };
  exchange.renew();
  visit_selected([&](float score) { most = fmaxf(most, score); });
  most = over_row(exchange, kExtrema, most, MaxOf());
  visit_selected([&](float score) { sum += exp2_approx((score - most) * kLog2e); });
  sum = over_row(exchange, kBinSums, sum, SumOf());
  if (selection.count == 0 || most == positive_infinity()) return positive_infinity();
  const float log2_sum = log2f(sum);
  return base2 ? fmaf(most, kLog2e, log2_sum) : fmaf(log2_sum, kLn2, most);
}

}  // namespace cupymla::topk
