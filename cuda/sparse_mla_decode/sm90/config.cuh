// Which consumers a CTA has: those of the sparse MLA forward, and the budgets they must keep here.
#pragma once

#include "../../sparse_mla_fwd/sm90/merge.cuh"
#include "../../sparse_mla_fwd/sm90/small_head_scores.cuh"
#include "../../sparse_mla_fwd/sm90/small_head_values.cuh"

namespace cupymla::sparse_mla_decode {

// As many heads as a wgmma has rows; unlike the forward's, the CTAs of a cluster may share the entries of a row.
template <int kDQk>
struct ManyHeads : sparse_mla_fwd::ManyHeads<kDQk> {
  using Base = sparse_mla_fwd::ManyHeads<kDQk>;
  static constexpr bool kSplit = true;
  static constexpr int kMaxCluster = 16;
  // The producer has two steps of a row and its scales in registers.
  static constexpr int kProducerRegisters = 104;
  static constexpr int kConsumerRegisters[] = {200, 200};
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

template <int kDQk, int kHeadsArg>
struct SmallHead : sparse_mla_fwd::SmallHead<kDQk, kHeadsArg, true> {
  using Base = sparse_mla_fwd::SmallHead<kDQk, kHeadsArg, true>;
  static constexpr int kProducerRegisters = 104;
  static constexpr int kConsumerRegisters[] = {224, 176};  // scores, values
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumerRegisters[0] + kConsumerRegisters[1];
  static_assert(kWarpgroupRegisters <= pool_registers(Base::kThreads), "the pool that the CTA gets at launch");
};

}  // namespace cupymla::sparse_mla_decode

namespace cupymla::sparse_mla_fwd {

// Key tiles come behind Q; what a CTA leaves for the others lies over both.
template <int kDQk>
struct alignas(1024) Storage<sparse_mla_decode::ManyHeads<kDQk>> : Storage<ManyHeads<kDQk>> {
  using Config = ManyHeads<kDQk>;
  static constexpr int kKeyBytes = (1 + Config::kBuffers) * Config::kKeyTiles * Config::kTileBytes;
};

template <int kDQk, int kHeads>
struct alignas(1024) Storage<sparse_mla_decode::SmallHead<kDQk, kHeads>> : Storage<SmallHead<kDQk, kHeads, true>> {};

static_assert(sizeof(Storage<sparse_mla_decode::ManyHeads<576>>) <= kSharedMemoryLimit);
static_assert(sizeof(Storage<sparse_mla_decode::ManyHeads<512>>) <= kSharedMemoryLimit);

}  // namespace cupymla::sparse_mla_fwd
