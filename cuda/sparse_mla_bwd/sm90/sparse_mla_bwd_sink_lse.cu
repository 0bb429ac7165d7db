// Sparse MLA attention, gradients: a stage of calls whose attention distribution counts the sink, for Hopper and newer.
#include "../../common/entry.cuh"
#include "../sink_lse.cuh"

extern "C" __global__ void __launch_bounds__(cupymla::sparse_mla_bwd::kSinkLseThreads)
    sparse_mla_bwd_sink_lse(const __grid_constant__ cupymla::sparse_mla_bwd::SinkLseParameters params) {
  cupymla::sparse_mla_bwd::make_sink_lse(params);
}

CUPYMLA_LAUNCH_FACTS(threads = cupymla::sparse_mla_bwd::kSinkLseThreads, cluster = 1, smem_bytes = 0,
                     parameter_bytes = sizeof(cupymla::sparse_mla_bwd::SinkLseParameters));
