// Copies of contiguous bytes from global to shared memory, one instruction of one thread each (PTX ISA, "cp.async.bulk").
#pragma once

#include "barrier.cuh"

namespace cupymla {

// `bytes`, a multiple of 16, from and to addresses that are. `barrier` gets them when they are there.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, Mbarrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "l"(source), "r"(bytes), "r"(smem_address(&barrier.state))
               : "memory");
}

}  // namespace cupymla
