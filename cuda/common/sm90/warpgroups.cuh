// Warpgroups of a kernel with one producer and consumers that have the same budget of registers.
#pragma once

#include "../registers.cuh"

namespace cupymla::sm90 {

template <int kConsumersArg, int kProducerRegistersArg, int kConsumerRegistersArg>
struct Warpgroups {
  static constexpr int kWarpgroup = 128;  // threads
  static constexpr int kConsumers = kConsumersArg;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr int kThreads = kConsumerThreads + kWarpgroup;
  static constexpr int kProducerRegisters = kProducerRegistersArg;
  static constexpr int kConsumerRegisters = kConsumerRegistersArg;
  static constexpr int kWarpgroupRegisters = kProducerRegisters + kConsumers * kConsumerRegisters;

  static_assert(kWarpgroupRegisters <= pool_registers(kThreads), "the pool that the CTA gets at launch");
};

}  // namespace cupymla::sm90
