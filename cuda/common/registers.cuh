// Registers: moving them between warpgroups (PTX ISA, "setmaxnreg"; sm_90a and later "a" and "f" targets), and values
// whose origin the compiler is not to know.
#pragma once

#include "types.cuh"

namespace cupymla {

// Registers per thread that the warpgroups of a CTA, alone on its SM, have all together: what it got at launch. `.inc`
// waits until that pool has enough, so larger budgets wait for ever, whatever is left in the register file.
__host__ __device__ constexpr int pool_registers(int threads) { return 65536 / threads / 8 * 8 * threads / 128; }

template <uint32_t kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// An empty statement that might have changed the value: it stays in its register, for it cannot be computed again, and
// what depends on it is computed behind this point.
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void make_opaque(int64_t& value) { asm volatile("" : "+l"(value)); }
__device__ __forceinline__ void make_opaque(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void make_opaque(const uint8_t*& pointer) { asm volatile("" : "+l"(pointer)); }

}  // namespace cupymla
