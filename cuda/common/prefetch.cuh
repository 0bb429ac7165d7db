// Bringing a line into L2 without waiting for it (PTX ISA, "prefetch").
#pragma once

namespace cupymla {

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace cupymla
