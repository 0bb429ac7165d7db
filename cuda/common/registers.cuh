// Moving registers between warpgroups (PTX ISA, "setmaxnreg"; sm_90a and later "a" targets).
#pragma once

#include "integers.cuh"

namespace cupymla {

template <uint32_t kRegisters>
__device__ __forceinline__ void registers_give_back() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void registers_take() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace cupymla
