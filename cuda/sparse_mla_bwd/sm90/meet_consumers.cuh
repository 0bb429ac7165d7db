// Where a CTA's consumers wait for one another.
#pragma once

#include "../../common/barrier.cuh"

namespace cupymla::sparse_mla_bwd {

// All consumers meet, twice in a head block: `time` 0 when row statistics are out, 1 when they are done with, which
// behind a cluster's last head block nobody asks. AnyStorage: of a single CTA or of one of a cluster.
template <typename AnyStorage>
__device__ __forceinline__ void meet_consumers(AnyStorage& storage, uint32_t time) {
  storage.statistics_out.arrive();
  storage.statistics_out.wait(time);
}

}  // namespace cupymla::sparse_mla_bwd
