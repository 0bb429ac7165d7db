// Which consumers a CTA has: those of the sparse MLA forward, and the budgets they must keep here.
#pragma once

#include "../../sparse_mla_fwd/sm90/merge.cuh"
#include "../../sparse_mla_fwd/sm90/small_head_scores.cuh"
#include "../../sparse_mla_fwd/sm90/small_head_values.cuh"

namespace cupymla::sparse_mla_decode {

// A key buffer of two CTAs, each of which brings in half of the rows of both: they are freed for both.
struct SharedFreeBarrier : Mbarrier {
  __device__ __forceinline__ void arrive() {
    Mbarrier::arrive();
    cluster_arrive_after_reads_at(cluster_address(smem_address(&state), asked_rank() ^ 1u));
  }
};

template <int kDQk, uint32_t kSharersArg, bool kConsumersConvertArg>
struct KeyBuffers : sparse_mla_fwd::ManyHeads<kDQk> {
  static constexpr bool kConsumersConvert = kConsumersConvertArg;  // the right half's columns: own_share.cuh
  static constexpr uint32_t kSharers = kSharersArg;
  static_assert(kSharers == 1 || !kConsumersConvert);
  using FreeBarrier = conditional_t<kSharers == 1, Mbarrier, SharedFreeBarrier>;
  static_assert(kSharers == 1 || kSharers == 2);
};

// As many heads as a wgmma has rows; unlike the forward's, the CTAs of a cluster may share the entries of a row, and
// two of neighbouring head blocks the rows of the cache.
template <int kDQk, uint32_t kSharersArg, bool kConsumersConvertArg>
struct ManyHeads : KeyBuffers<kDQk, kSharersArg, kConsumersConvertArg> {
  using Base = KeyBuffers<kDQk, kSharersArg, kConsumersConvertArg>;
  static constexpr bool kSplit = true;
  static constexpr bool kSkipsFresh = true;  // a CTA with few blocks waits for instructions
  static constexpr int kMaxCluster = 16;
  // Rows that a CTA may take, one after the other, so that the producer brings in the next one while the last one ends.
  // Consumers that convert have no second set of row statistics for that.
  static constexpr uint32_t kMostRows = kConsumersConvertArg ? 1 : 4;
  // Where codes are converted into bf16, the producer has a block's in registers, all of them or half.
  static constexpr int kProducerRegisters = kConsumersConvertArg ? 88 : 104;
  static constexpr int kForConsumer = kConsumersConvertArg ? 208 : 200;
  static constexpr int kConsumerRegisters[] = {kForConsumer, kForConsumer};
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

template <int kDQk, int kHeadsArg>
struct SmallHead : sparse_mla_fwd::SmallHead<kDQk, kHeadsArg, true> {
  using Base = sparse_mla_fwd::SmallHead<kDQk, kHeadsArg, true>;
  static constexpr bool kSkipsFresh = true;
  static constexpr bool kConsumersConvert = false;
  static constexpr uint32_t kMostRows = 1;
  static constexpr int kProducerRegisters = 104;
  static constexpr int kConsumerRegisters[] = {224, 176};  // scores, values
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

}  // namespace cupymla::sparse_mla_decode

namespace cupymla::sparse_mla_fwd {

// Key tiles come behind Q; what a CTA leaves for the others lies over both.
template <int kDQk, uint32_t kSharers, bool kConsumersConvert>
struct alignas(1024) Storage<sparse_mla_decode::ManyHeads<kDQk, kSharers, kConsumersConvert>>
    : Storage<sparse_mla_decode::KeyBuffers<kDQk, kSharers, kConsumersConvert>> {
  using Config = ManyHeads<kDQk>;
  static constexpr int kKeyBytes = (1 + Config::kBuffers) * Config::kKeyTiles * Config::kTileBytes;

  // A row's two words of scales for the consumers, of the block in a buffer: in the place of the second set of row
  // statistics, which one query does not use.
  __device__ __forceinline__ float& scale_word(int buffer, int word, uint32_t row) {
    return word == 0 ? this->row_max[1][buffer][row] : this->row_sum[1][buffer][row];
  }
};

template <int kDQk, int kHeads>
struct alignas(1024) Storage<sparse_mla_decode::SmallHead<kDQk, kHeads>> : Storage<SmallHead<kDQk, kHeads, true>> {};

static_assert(sizeof(Storage<sparse_mla_decode::ManyHeads<576, 1, true>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<sparse_mla_decode::ManyHeads<576, 2, false>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<sparse_mla_decode::ManyHeads<512, 2, false>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
