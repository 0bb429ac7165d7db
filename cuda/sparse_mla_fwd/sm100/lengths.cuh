// How many entries of each query can be valid: one warp of a cluster reads topk_length, for all roles of all its CTAs,
// a batch of queries at a time and up to two batches ahead. Roles that read it for themselves would wait for blocks
// that never come if it changed under way.
#pragma once

#include "../../common/cluster.cuh"
#include "../../common/ring.cuh"
#include "work.cuh"

namespace cupymla::sparse_mla_fwd {

// The warp that reads. It has no other work, and may wait for the slowest role without holding up another.
template <typename Storage>
struct LengthReader {
  using Config = typename Storage::Config;
  static constexpr uint32_t kLengths = Config::kLengths;
  static_assert(32 % kLengths == 0);

  Storage& storage;
  const Parameters& params;
  const CtaPosition<Config> cta;
  const uint32_t lane = threadIdx.x % 32;
  Ring<Config::kLengthBatches> ring;

  __device__ __forceinline__ LengthReader(Storage& storage, const Parameters& params)
      : storage(storage), params(params) {}

  __device__ __forceinline__ void run() {
    if (params.topk_length == nullptr) return;
    const Items items(cta);
    for (uint32_t first = items.first; first < params.items; first += kLengths * items.step) {
      const uint32_t item = first + lane * items.step;
      const int32_t entries = lane < kLengths && item < params.items ? read_entries(item) : 0;
      storage.lengths_free[ring.stage].wait(ring.free());
      hand_on(entries);
      ring.advance();
    }
  }

  __device__ __forceinline__ int32_t read_entries(uint32_t item) const {
    return Work<Config>::read_entries(params, QueryPosition(params, item / params.head_blocks));
  }

  // To all CTAs what the first lanes have read.
  __device__ __forceinline__ void hand_on(int32_t entries) const {
    const uint32_t own = lane % kLengths;
    entries = __shfl_sync(0xffffffffu, entries, static_cast<int>(own));
    for (uint32_t rank = lane / kLengths; rank < Config::kCtas * cta.parts; rank += 32 / kLengths) {
      const uint32_t full = cluster_address(smem_address(&storage.lengths_full[ring.stage].state), rank);
      if (own == 0) cluster_arrive_and_expect_at(full, sizeof(storage.lengths[0]));
      cluster_store_async_int32(cluster_address(smem_address(&storage.lengths[ring.stage][own]), rank), entries, full);
    }
  }
};

// A role's place among them. `kSingleThread`: the role is one thread, not all lanes of a warp.
template <typename Storage, bool kSingleThread = false>
struct Lengths {
  using Config = typename Storage::Config;
  static constexpr uint32_t kLengths = Config::kLengths;

  Storage& storage;
  const Parameters& params;
  uint32_t taken = 0;

  // Of the next item.
  __device__ __forceinline__ int32_t next() {
    if (params.topk_length == nullptr) return params.topk;
    const uint32_t batch = taken / kLengths % Config::kLengthBatches, own = taken % kLengths;
    if (own == 0) storage.lengths_full[batch].wait(taken / (kLengths * Config::kLengthBatches) % 2);
    const int32_t entries = storage.lengths[batch][own];
    if (own + 1 == kLengths) release(storage.lengths_free[batch]);
    ++taken;
    return entries;
  }

  __device__ __forceinline__ void release(const Mbarrier& free) const {
    if constexpr (!kSingleThread) __syncwarp();
    if (kSingleThread || threadIdx.x % 32 == 0) {
      cluster_arrive_after_reads_at(cluster_address(smem_address(&free.state), Config::kReaderRank));
    }
  }
};

}  // namespace cupymla::sparse_mla_fwd
