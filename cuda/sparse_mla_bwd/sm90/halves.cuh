// The attention in halves, for more than 64 heads: P and dS of some queries, dQ and dKV of those whose P and dS the launch
// before has made. The second half waits for L2, the first one does not; so clusters of both are on the GPU at a time.
#pragma once

#include "gradient_stage.cuh"
#include "score_stage.cuh"

namespace cupymla::sparse_mla_bwd {

template <int kDQkArg, bool kPartialsArg>
struct HalvesConfig {
  using Scores = ScoreConfig<kDQkArg>;
  using Gradients = GradientConfig<kDQkArg, kPartialsArg>;
  static constexpr int kCluster = Gradients::kShares;
  static constexpr int kHeads = kPassGroups * Scores::kHeads;
  static constexpr int kThreads = Scores::kThreads;
  static constexpr int kWarpgroupRegisters = Scores::kWarpgroupRegisters;
  static constexpr size_t kSmemBytes = sizeof(ScoreStorage<Scores>) > sizeof(GradientStorage<Gradients>)
                                           ? sizeof(ScoreStorage<Scores>)
                                           : sizeof(GradientStorage<Gradients>);
  static_assert(Gradients::kThreads == kThreads && Gradients::kWarpgroupRegisters == kWarpgroupRegisters);
};

template <typename Config, typename Element>
__device__ __forceinline__ void halves(uint8_t* shared_memory, const Parameters& params, const TensorMap& q_map,
                                       const TensorMap& dout_map) {
  // Clusters of the second half are as evenly among all as can be.
  const uint32_t cluster = blockIdx.x / Config::kCluster;
  const uint32_t all = gridDim.x / Config::kCluster, seconds = params.query_end - params.query_begin;
  const uint32_t before = static_cast<uint32_t>(static_cast<uint64_t>(cluster) * seconds / all);
  const uint32_t up_to_here = static_cast<uint32_t>((static_cast<uint64_t>(cluster) + 1) * seconds / all);
  if (up_to_here > before) {
    gradients<typename Config::Gradients, Element>(
        *reinterpret_cast<GradientStorage<typename Config::Gradients>*>(shared_memory), params, before, q_map, dout_map);
  } else {
    scores<typename Config::Scores, Element>(*reinterpret_cast<ScoreStorage<typename Config::Scores>*>(shared_memory),
                                             params, (cluster - before) * Config::kCluster + blockIdx.x % Config::kCluster, q_map,
                                             dout_map);
  }
}

}  // namespace cupymla::sparse_mla_bwd
