// Accesses to shared memory that a predicate turns off. A branch would be another way through the code: with these,
// threads that have an effect and threads that have none run the same instructions.
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

// As `load_shared_8`, if `loads`, else zeros.
__device__ __forceinline__ void load_shared_8_if(bool loads, uint32_t& a, uint32_t& b, uint32_t address) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n mov.u32 %0, 0;\n mov.u32 %1, 0;\n"
      " @p ld.shared.v2.u32 {%0, %1}, [%3];\n}"
      : "=&r"(a), "=&r"(b)
      : "r"(static_cast<uint32_t>(loads)), "r"(address)
      : "memory");
}

}  // namespace cupymla
