// Where operands lie in shared memory, for descriptors that are to be in uniform registers.
#pragma once

#include "../../common/barrier.cuh"

namespace cupymla::sparse_mla_bwd {

// Where a CTA's storage begins. Through a reduction, whose result is in a uniform register: in an ordinary one ptxas
// would keep every descriptor there, from one product to another that reads the same.
template <typename Storage>
__device__ __forceinline__ uint32_t uniform_base(const Storage& storage) {
  return __reduce_max_sync(0xffffffffu, smem_address(&storage));
}

// From there to a part of it: a difference of pointers, which is constant, not of their addresses in shared memory.
template <typename Storage>
__device__ __forceinline__ uint32_t place_from(uint32_t base, const Storage& storage, const void* part) {
  const auto* start = reinterpret_cast<const uint8_t*>(&storage);
  return base + static_cast<uint32_t>(static_cast<const uint8_t*>(part) - start);
}

}  // namespace cupymla::sparse_mla_bwd
