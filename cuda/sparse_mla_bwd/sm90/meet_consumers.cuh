// Where a CTA's consumers wait for one another.
#pragma once

#include "../../common/barrier.cuh"

namespace cupymla::sparse_mla_bwd {

// All consumers meet, twice in a pass: `time` 0 when row statistics are out, 1 when they are done with, which behind a
// pair's last pass nobody asks. AnyStorage: of a single CTA or of one of a pair.
template <typename AnyStorage>
__device__ __forceinline__ void meet_consumers(AnyStorage& storage, uint32_t time) {
  storage.statistics_out.arrive();
  storage.statistics_out.wait(time);
}

}  // namespace cupymla::sparse_mla_bwd
