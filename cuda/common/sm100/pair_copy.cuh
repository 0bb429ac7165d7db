// Tensor copies in a pair of CTAs that the even one's barrier counts (PTX ISA, "cp.async.bulk.tensor",
// ".cta_group::2"; sm_100f).
#pragma once

#include "gather.cuh"

namespace cupymla::sm100 {

// Box at (c0, c1, c2, c3), innermost first, into this CTA's shared memory; elements outside the tensor read as zero and
// count as copied bytes.
__device__ __forceinline__ void tma_load_4d_of_pair(void* destination, const TensorMap& map, const Mbarrier& full,
                                                    int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(destination)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(leader_address(full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace cupymla::sm100
