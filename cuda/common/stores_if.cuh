// Stores that a predicate turns off. A branch would be another way through the code: with these, warps that store and
// warps that do not run the same instructions.
#pragma once

#include "types.cuh"

namespace cupymla {

// As `store_shared_16`, if `stores`.
__device__ __forceinline__ void store_shared_16_if(bool stores, uint32_t address, const uint4& value) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n @p st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
          static_cast<uint32_t>(stores)),
      "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

// As `cluster_store_async_float4`, if `stores`.
__device__ __forceinline__ void cluster_store_async_16_if(bool stores, uint32_t address, const uint4& value,
                                                          uint32_t mbarrier_address) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n"
      " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%1], {%2, %3, %4, %5}, [%6];\n}" ::"r"(
          static_cast<uint32_t>(stores)),
      "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(mbarrier_address)
      : "memory");
}

}  // namespace cupymla
