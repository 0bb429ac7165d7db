// For each row a threshold that somewhat more entries reach than are wanted, from the scores of a sample of its keys.
#pragma once

#include "../../topk/sm80/select_row.cuh"
#include "limit.cuh"

namespace cupymla::indexer_topk {

// The part of a row's sample that it sees: every `sample_stride`-th key.
__device__ __forceinline__ topk::Row sampled_row(const FilterParameters& params, const topk::Row& row) {
  const int32_t stride = params.sample_stride;
  topk::Row sampled(row.scores, (row.end + stride - 1) / stride);
  sampled.begin = min((row.begin + stride - 1) / stride, sampled.end);
  sampled.find_groups();
  return sampled;
}

// Standard deviations are of independent scores. Threads meet the groups of a short sample several times.
__device__ __forceinline__ uint32_t sample_rank(const topk::Thread& thread, const FilterParameters& params,
                                                const topk::Row& row, const topk::Row& sampled) {
  const float share = static_cast<float>(params.topk) / static_cast<float>(row.visible());
  const float mean = share * static_cast<float>(thread.threads * topk::kGroup);
  const float times = fmaxf(1.0f, static_cast<float>(thread.threads) / static_cast<float>(sampled.groups));
  return static_cast<uint32_t>(mean + topk::kDeviations * sqrtf(mean * times)) + 2u;
}

__device__ __forceinline__ void write_threshold(const FilterParameters& params, uint8_t* shared_memory) {
  using namespace cupymla::topk;
  Storage& storage = *reinterpret_cast<Storage*>(shared_memory);
  const Thread thread;
  for (uint32_t i = thread.index; i < kBins; i += thread.threads) storage.bins[i] = 0;
  __syncthreads();
  const uint32_t number = blockIdx.x;
  const Row row(params, 0, number, limit_of(params, number));
  const Row sampled = sampled_row(params, row);
  float threshold = negative_infinity();
  if (row.visible() > params.topk && sampled.groups > 0) {
    threshold = sampled_threshold(storage, sampled, sample_rank(thread, params, row, sampled));
  }
  if (thread.index == 0) {
    params.thresholds[number] = threshold;
    params.counts[number] = 0;
    if (number == 0) {
      for (int32_t chunk = 0; chunk < params.chunks; ++chunk) params.flagged[chunk] = 0;
    }
  }
}

}  // namespace cupymla::indexer_topk
