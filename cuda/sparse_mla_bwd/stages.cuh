// What a translation unit of the backward can be compiled to, and every stage but the attention, which each
// architecture has its own kernel for. How the stages follow each other is told in README.md.
//
// CUPYMLA_STAGE is a number of `Stage`; those of `STAGES` in cupymla/ops/sparse_mla_bwd/plan.py are the same.
#pragma once

#include "../common/grid_dependency.cuh"
#include "dkv_rows.cuh"
#include "merge.cuh"
#include "sink.cuh"
#include "entry_lists.cuh"
#include "sum_rows.cuh"
#include "token_order.cuh"

namespace cupymla::sparse_mla_bwd {

// `merge` is of the translation unit for neighbouring queries alone. It and `sort` have dynamic shared memory, so they
// are the translation units' business, as the attention is.
enum Stage { kAttention, kZero, kRound, kSink, kClear, kCount, kScan, kPlace, kSum, kMerge, kSort, kScatter,
             kPDs, kDqDkv, kStages };

// Threads of a CTA; the attention's are its own business.
constexpr unsigned kPrePostThreads[kStages] = {0,            kRowThreads,  kRowThreads,  kSinkThreads, kListThreads,
                                               kListThreads, kScanThreads, kListThreads, kSumThreads,
                                               kMergeThreads, kMergeThreads, kScatterThreads, 0,            0};

// kChunks: whether lists are made for several chunks of queries at once.
template <int kStage, bool kChunks>
__device__ __forceinline__ void list_entries(const Parameters& params) {
  static_assert(kStage >= kClear && kStage <= kPlace);
  if constexpr (kStage == kClear) clear_counts<kChunks>(params);
  if constexpr (kStage == kCount) count_entries<kChunks>(params);
  if constexpr (kStage == kScan) scan_rows<kChunks>(params);
  if constexpr (kStage == kPlace) place_entries<kChunks>(params);
}

template <int kStage, int kDQk, typename Element>
__device__ __forceinline__ void pre_post_process(const Parameters& params) {
  static_assert(kStage > kAttention && kStage < kStages && kStage != kMerge && kStage != kSort &&
                    kStage != kPDs && kStage != kDqDkv,
                "no such stage");
  wait_for_primary_grid(params.has_dependent != 0);
  if constexpr (kStage == kZero) zero<kDQk>(params);
  if constexpr (kStage == kRound) round<kDQk, Element>(params);
  if constexpr (kStage == kSink) sum_sink_terms(params);
  if constexpr (kStage >= kClear && kStage <= kPlace) list_entries<kStage, false>(params);
  if constexpr (kStage == kSum) sum_rows<kDQk>(params);
  if constexpr (kStage == kScatter) scatter_distribution(params);
}

}  // namespace cupymla::sparse_mla_bwd
